"""Runs under train.compile=blocks: the bits, files and names of runs without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher.checkpoint.export import export
from tests.faults.launching import Ended, Started

RECIPES = Path(__file__).with_name("blocked.py")
BLOCKS = "train.compile=blocks"


def trained(directory: Path, *words: str, ranks: int = 1) -> Ended:
    common = (f"recipes.path={RECIPES}", "train.max_steps=16", "train.eval_every_steps=8")
    with Started(directory, ("recipe.uses=blocked", *common, *words), ranks) as started:
        return started.end(timeout_s=300)  # a C++ compiler takes its time where nothing is cached


def said_of(ended: Ended, topic: str) -> list[str]:
    return [event["text"] for event in ended.events("decision") if event["topic"] == topic]


def numbers(ended: Ended, *names: str) -> list[tuple[object, ...]]:
    return [tuple(event[name] for name in names) for event in ended.events("step")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("precision", "ranks"), [("fp32", 1), ("fp16", 2), ("amp_fp16", 1), ("bf16", 2)], ids=str
)
def test_it_gives_the_bits_of_a_plain_run_and_resumes(tmp_path: Path, precision: str, ranks: int) -> None:
    """Skipped steps, smaller last batches, the average and the evaluations included."""
    words = (f"precision={precision}", "ema.decay=0.8", "ema.every_steps=2")
    if "fp16" in precision:
        words += ("precision.loss_scale.init_scale=2097152",)
    plain = trained(tmp_path / "plain", *words, ranks=ranks)
    whole = trained(tmp_path / "whole", *words, BLOCKS, ranks=ranks)
    (text,) = said_of(whole, "compile")
    assert text.startswith("by block: 3 x Block; ")
    assert whole.warnings == plain.warnings
    assert whole.digest == plain.digest
    assert whole.result["ema_sha256"] == plain.result["ema_sha256"]
    assert whole.result["skipped_steps"] == plain.result["skipped_steps"]
    assert (plain.result["skipped_steps"] > 0) == ("fp16" in precision)
    assert numbers(whole, "step", "loss") == numbers(plain, "step", "loss")
    assert whole.result["metrics"] == plain.result["metrics"]

    for step in (10, 15):  # before and after the smaller batch, for which blocks are compiled again
        start = f"checkpoint.resume={whole.checkpoints[step]}"
        resumed = trained(tmp_path / f"resumed{step}", *words, BLOCKS, start, ranks=ranks)
        assert resumed.digest == whole.digest
        assert resumed.result["ema_sha256"] == whole.result["ema_sha256"]

    files = [tmp_path / f"{ended.directory.name}.safetensors" for ended in (plain, whole)]
    for ended, file in zip((plain, whole), files, strict=True):
        export(ended.directory, file)
    exported, compiled = map(load_file, files)
    assert list(exported) == list(compiled)
    assert all(torch.equal(value, compiled[name]) for name, value in exported.items())


def test_a_model_without_blocks_is_refused_before_the_first_step(tmp_path: Path) -> None:
    ended = trained(tmp_path / "run", "recipe.uses=flat", BLOCKS)
    assert ended.codes == [2], ended
    assert "train.compile=blocks: the model Sequential has no repeated blocks" in ended.outputs[0]
    assert "Use train.compile=true" in ended.outputs[0]
    assert ended.events("step") == []
