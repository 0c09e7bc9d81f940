"""data.val_fraction=0: a run that trains on all samples and evaluates nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.report.page import write_report
from launcher.report.run import Run
from tests.faults.launching import Ended, run
from tests.forked import launch_forked

pytestmark = pytest.mark.timeout(90)

RECIPE = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

@recipe("all")
def all_of_it(config):
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = TensorData({"image": x, "label": x[:, :3].argmax(1)})

    return Recipe(lambda: nn.Linear(4, 3), data, SETS, cross_entropy, classes=("a", "b", "c"))
"""
WORDS = ("recipe.uses=all", "precision=fp32", "train.max_steps=7", "data.val_fraction=0")


def train(directory: Path, *words: str, sets: str = "{}", ranks: int = 2) -> Ended:
    (directory / "own.py").write_text(RECIPE.replace("SETS", sets))
    return run(directory / "run", f"recipes.path={directory / 'own.py'}", *WORDS, *words, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("sets", ["{}", "TensorData(data.select(torch.arange(0)))"])
def test_nothing_is_evaluated_and_the_run_is_done(tmp_path: Path, sets) -> None:
    ended = train(tmp_path, "checkpoint.every_steps=3", sets=sets)
    assert ended.codes == [0, 0], ended
    assert (ended.status["state"], ended.result["state"]) == ("done", "done")
    assert (ended.result["metric"], ended.result["metrics"]) == (None, {})
    assert not ended.events("eval")
    assert list(ended.checkpoints) == [3, 6, 7]
    assert "48 samples to train on, none to validate on" in ended.outputs[0]
    assert write_report(Run.read(ended.directory)).is_file()
    longer = train(tmp_path, "train.max_steps=9", sets=sets)
    assert longer.codes == [0, 0], longer
    assert longer.events("start")[-1]["step"] == 7


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=cnn", "data=digits"),
        pytest.param(("recipe=gpt", "data.path=text.txt", "data.block_size=8"), marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_the_sets_that_come_with_the_launcher_hold_nothing_out(tmp_path: Path, words) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 60)
    short = ("data.val_fraction=0", "train.max_steps=2", "tracker=none", "data.batch_size=16")
    done = launch_forked(tmp_path, [*words, *short])
    assert done.returncode == 0, done.stderr
    assert "none to validate on" in done.stdout
