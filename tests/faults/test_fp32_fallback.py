"""Models whose activations leave the range of fp16: each fails without fp32_fallback, and trains with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.launching import Ended, run
from tests.faults.overflowing import BACKWARD_MODELS, MODELS

RECIPES = Path(__file__).with_name("overflowing.py")
FALLBACKS = {
    "feed_forward": [["blocks.*.wo"]],
    "embeddings": [["tokens"]],
    "attention": [["blocks.0", "blocks.1"]],
    "gated_unit": [["blocks.0", "blocks.1"]],
    "no_norm": [["blocks.*.inner"], ["head"]],
    "shrunk": [["blocks.0", "blocks.1"]],
    "between_modules": [["inner"], ["first"]],
}
NAMED = {  # by the error of a run that does not fall back
    "shrunk": "first gradient that was not finite: at the input of blocks.1 (Shrunk)",
    "between_modules": "first gradient that was not finite: at the output of inner (Linear)",
}
# Weights that read values of 1e5 must be small, and change slowly.
SLOWER = {
    "gated_unit": ["optim.groups=[{match: '*.down.weight', lr_scale: 1e-5}]"],
    "no_norm": ["optim.groups=[{match: head.weight, lr_scale: 1e-5}]"],
}


def trained(directory: Path, name: str, *words: str, ranks: int = 1, **options: Any) -> Ended:
    common = (f"recipes.path={RECIPES}", f"recipe.uses={name}", "optim=adamw", "optim.lr=0.003")
    sizes = ("data.batch_size=64", "train.epochs=6", "checkpoint.every_steps=null")
    scale = ("precision.loss_scale.init_scale=1", "precision.loss_scale.growth_interval=1000")
    return run(directory, *common, *SLOWER.get(name, ()), *sizes, *scale, *words, ranks=ranks, **options)


def fallbacks(ended: Ended) -> list[list[str]]:
    return [event["patterns"] for event in ended.events("decision") if event["topic"] == "fp32 fallback"]


def fp32_modules_of(ended: Ended) -> list[str]:
    config = yaml.safe_load((ended.directory / "config.yaml").read_text())
    return list(config["precision"]["fp32_modules"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *BACKWARD_MODELS])
def test_each_fails_in_fp16_and_trains_as_in_fp32_with_a_fallback(tmp_path: Path, name: str) -> None:
    fp32 = trained(tmp_path / "fp32", name, "precision=fp32")
    failed = trained(tmp_path / "fp16", name)
    assert failed.codes == [5]
    assert NAMED.get(name, "") in failed.outputs[0]
    ended = trained(tmp_path / "fallback", name, "precision.fp32_fallback=true")
    assert ended.codes == [0], ended
    assert fallbacks(ended) == FALLBACKS[name]
    assert ended.result["skipped_steps"] == len(FALLBACKS[name])
    of_fp32, of_fp16 = (each.events("eval")[-1]["val_loss"] for each in (fp32, ended))
    assert of_fp32 < 1.25  # of 1.39 by chance
    assert of_fp16 == pytest.approx(of_fp32, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no_norm", "between_modules"])
def test_two_ranks_fall_back_alike_and_a_resume_from_any_step_ends_with_the_same_bits(
    tmp_path: Path, name: str
) -> None:
    words = ("precision.fp32_fallback=true", "train.max_steps=6", "ddp.check_replicas_every_steps=1")
    saving = ("checkpoint.every_steps=1", "checkpoint.keep=10")
    whole = trained(tmp_path / "whole", name, *words, *saving, ranks=2)
    assert whole.codes == [0, 0], whole
    assert fallbacks(whole) == FALLBACKS[name]
    for step in (1, 4):
        start = f"checkpoint.resume={whole.checkpoints[step]}"
        resumed = trained(tmp_path / f"from{step}", name, *words, start, ranks=2)
        assert resumed.digest == whole.digest
        assert fallbacks(resumed) == FALLBACKS[name][step:]
        assert fp32_modules_of(resumed) == [module for found in FALLBACKS[name] for module in found]


def test_the_config_of_a_run_that_fell_back_starts_the_next_one_with_its_modules(tmp_path: Path) -> None:
    words = ("precision.fp32_modules=[blocks.*.inner, head]", "train.max_steps=3")
    ended = trained(tmp_path / "run", "no_norm", *words)
    assert ended.codes == [0], ended
    assert ended.result["skipped_steps"] == 0


def test_a_backward_overflow_at_the_smallest_scale_falls_back_and_the_scale_starts_anew(
    tmp_path: Path,
) -> None:
    words = ("precision.loss_scale.init_scale=4", "train.max_steps=8", "precision.fp32_fallback=true")
    ended = trained(tmp_path / "run", "shrunk", *words)
    assert ended.codes == [0], ended
    assert fallbacks(ended) == FALLBACKS["shrunk"]
    scales = [event["scale"] for event in ended.events("step")]
    assert scales == [4, 2, 1, 4, 4, 4, 4, 4]


def test_with_a_static_scale_a_backward_overflow_changes_no_module(tmp_path: Path) -> None:
    static = ("precision.loss_scale.mode=static", "precision.loss_scale.max_skips_at_min_scale=2")
    ended = trained(tmp_path / "run", "shrunk", "precision.fp32_fallback=true", *static)
    assert ended.codes == [5], ended
    assert fallbacks(ended) == []


@pytest.mark.slow
def test_after_max_fp32_fallbacks_the_run_ends_with_the_module_named(tmp_path: Path) -> None:
    ended = trained(
        tmp_path / "run", "no_norm", "precision.fp32_fallback=true", "precision.max_fp32_fallbacks=1"
    )
    assert ended.codes == [5]
    assert fallbacks(ended) == FALLBACKS["no_norm"][:1]
    assert "first module whose output was not finite: head (Linear)" in ended.warnings[0]
    assert "precision.max_fp32_fallbacks=1" in ended.warnings[0]


@pytest.mark.slow
def test_a_gradient_beyond_fp16_of_a_module_in_fp32_is_named_and_amp_keeps_it(tmp_path: Path) -> None:
    words = (
        "precision.fp32_modules=[inner]",
        "precision.loss_scale.max_skips_at_min_scale=3",
        "optim.lr=1e-9",
    )
    ended = trained(tmp_path / "fp16", "steep", *words)
    assert ended.codes == [5], ended
    assert "Gradient not finite on ranks [0], in parameters: inner.weight" in ended.outputs[0]
    kept = ("precision=amp_fp16", "ddp.gradient_dtype=fp32", "train.max_steps=6")
    ended = trained(tmp_path / "kept", "steep", *kept, *words)
    assert ended.codes == [0], ended
    assert ended.result["skipped_steps"] == 0


def test_data_that_is_not_finite_makes_no_module_fall_back(tmp_path: Path) -> None:
    ended = trained(tmp_path / "run", "bad_rows", "precision.fp32_fallback=true")
    assert ended.codes == [5]
    assert fallbacks(ended) == []


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    ended = trained(tmp_path / "run", "no_norm", "precision.fp32_modules=[blocks.*.iner]")
    assert ended.codes == [2]
    assert "precision.fp32_modules: the pattern 'blocks.*.iner' matches none of" in ended.outputs[0]
    assert "Nearest: blocks.9.inner" in ended.outputs[0]
