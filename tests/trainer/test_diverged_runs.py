"""Whole runs that diverge, by the command line: they end with code 5, and the error names the cause."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.data.batch_plan import epoch_order
from launcher.run_dir.atomic import read_json
from tests.forked import launch_forked
from tests.test_end_to_end import launch, only_run

RECIPE = """
import torch
from torch import nn
from launcher.recipe import Config, Loss, Recipe, TensorData, cross_entropy, recipe

POISONED, FACTOR = {poisoned}, {factor}


@recipe("own")
def own(config: Config) -> Recipe:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 8, generator=generator)
    labels = torch.randint(0, 3, (64,), generator=generator)
    if POISONED is not None:
        images[POISONED, 5] = float("nan")

    def loss(network, batch) -> Loss:
        logits = network(batch["image"]).float() * FACTOR
        loss_sum = nn.functional.cross_entropy(logits, batch["label"], reduction="sum")
        return Loss(loss_sum, len(logits), logits.argmax(1))

    return Recipe(
        build_model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
        train=TensorData({{"image": images, "label": labels}}),
        validation=TensorData({{"image": images[:8].nan_to_num(), "label": labels[:8]}}),
        loss=loss,
        classes=("a", "b", "c"),
    )
"""
NUM_SAMPLES, BATCH = 64, 32


def diverge(directory: Path, words: Sequence[str], poisoned: int | None = None, factor: float = 1.0) -> str:
    """The error of a run on two ranks, printed once; also what its files hold."""
    (directory / "own.py").write_text(RECIPE.format(poisoned=poisoned, factor=factor))
    own = ["recipe=resnet18", "recipe.uses=own", "recipes.path=own.py", f"data.batch_size={BATCH}"]
    common = ["tracker=none", "schedule=constant", "train.epochs=20", "train.eval_every_epochs=20"]
    done = launch_forked(directory, [*own, *common, "launch.nproc=2", *words])
    assert done.returncode == 5
    assert "Traceback" not in done.stderr
    result = read_json(only_run(directory) / "result.json")
    assert (result["state"], result["exit"]) == ("failed", 5)
    status = json.loads((only_run(directory) / "status.json").read_text())
    assert (status["state"], status["exit"]) == ("failed", 5)
    error = result["error"]
    assert isinstance(error, str)
    assert done.stderr.count(error) == 1
    for rank in (0, 1):
        assert error in (only_run(directory) / "logs" / f"rank{rank}.log").read_text()
    return error


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_in_one_samples_pixels_names_rank_sample_and_module(tmp_path, rank) -> None:
    sample = int(epoch_order(NUM_SAMPLES, 0, 0)[BATCH // 2 * rank + 7])
    error = diverge(tmp_path, ["precision.loss_scale.max_bad_losses=1"], poisoned=sample)
    assert error.startswith(
        "the loss was not finite in 1 steps with none applied between them, the last being step 1."
    )
    assert f"Gradient not finite on ranks [{rank}]" in error
    assert f"  rank {rank}: training sample {sample} (of 16 in the micro-batch)" in error
    assert "not finite in the batch itself: image" in error
    assert "first module whose output was not finite: 0 (Linear), nan" in error
    assert "Loss scale: 65536" in error


def test_a_learning_rate_that_breaks_the_weights_ends_the_run_at_once(tmp_path) -> None:
    error = diverge(tmp_path, ["optim.lr=1e30"])
    assert re.match(r"the loss was not finite in step \d, because weights are not: .*\d\.weight", error)
    assert "lower optim.lr" in error.lower()
    assert re.search(
        r"first module whose output was not finite: \d \(Linear\), (nan|inf), from inputs", error
    )


@pytest.mark.slow
def test_an_infinite_master_is_named(tmp_path) -> None:
    error = diverge(tmp_path, ["optim.lr=1e30", "precision=fp32"], factor=1e12)
    assert re.search(r"because weights are not: .*0\.weight", error)


def test_an_overflow_at_the_floor_tells_the_scale_and_the_batch(tmp_path) -> None:
    words = ["precision.loss_scale.init_scale=4", "precision.loss_scale.max_skips_at_min_scale=3"]
    error = diverge(tmp_path, words, factor=1e7)
    assert error.startswith(
        "the gradient overflowed in 3 steps with none applied between them at loss scale 1, the smallest"
    )
    assert "Gradient not finite on ranks [0, 1], in parameters: " in error
    assert "3.weight" in error
    assert "Loss scale: 1\n" in error
    assert "  rank 0: micro-batch of 16 training samples " in error
    assert (
        "the forward pass is finite; first gradient that was not finite: at the output of 3 (Linear), inf"
        in error
    )


BAD_MODELS = {
    "frozen": ("nn.Linear(8, 3).requires_grad_(False)", "Linear has no trainable parameter"),
    "fp64": ("nn.Linear(8, 3).double()", "parameter weight is torch.float64"),
}


@pytest.mark.parametrize(
    ("starter", "model"),
    [
        pytest.param("torchrun", "frozen", marks=pytest.mark.slow),
        pytest.param("torchrun", "fp64", marks=pytest.mark.slow),  # from there on as in a parent's workers
        ("parent", "frozen"),
        ("parent", "fp64"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line_and_no_reason_to_restart(
    tmp_path, starter, model
) -> None:
    build, text = BAD_MODELS[model]
    recipe = re.sub(r"nn\.Sequential\(.*\),\n", f"{build},\n", RECIPE.format(poisoned=None, factor=1))
    (tmp_path / "own.py").write_text(recipe)
    own = ["recipe=resnet18", "recipe.uses=own", "recipes.path=own.py", f"data.batch_size={BATCH}"]
    own.append("tracker=none")
    alone = starter == "parent"
    restarts = ["launch.nproc=2", "launch.max_restarts=2"]
    done = launch_forked(tmp_path, [*own, *restarts]) if alone else launch(tmp_path, own)
    assert done.stderr.count(text) == 1
    assert "restart" not in done.stdout + done.stderr
    if alone:
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
