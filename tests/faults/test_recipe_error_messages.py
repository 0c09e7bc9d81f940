"""Runs whose recipe raises: its own traceback, one message with its line, each printed once."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.config.groups import PACKAGE
from launcher.errors import DataError
from launcher.run_dir.atomic import read_json
from launcher.telemetry.event_log import read_events
from tests.faults.launching import Ended, run
from tests.faults.parent import Parent, write_recipe
from tests.faults.usercode import is_here, own_rank
from tests.test_end_to_end import launch, only_run

pytestmark = pytest.mark.timeout(90)

RECIPE = """
import torch
from torch import nn
from launcher.recipe import Loss, Recipe, TensorData, cross_entropy, recipe

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x)  # FORWARD

def build():
    return Model()  # BUILD

def loss(network, batch):
    return cross_entropy(network, batch, inputs="x")  # LOSS

def transform(batch):
    return batch  # TRANSFORM

def eval_transform(batch):
    return batch  # EVAL

class Identity(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ArithmeticError("in the backward pass")

@recipe("mistaken")
def mistaken(config):
    x = torch.randn(64, 4)
    columns = {"x": x, "label": torch.arange(64) % 3}
    train, validation = TensorData(columns), TensorData(columns)
    pass  # RECIPE
    return Recipe(build, train, validation, loss, transform, eval_transform, classes=("a", "b", "c"))
"""
WORDS = ("recipe.uses=mistaken", "train.max_steps=2")

# The mark of the line that is replaced, its text, the exit code, and what the message says after the place.
MISTAKES: dict[str, tuple[str, str, int, str]] = {
    "a wrong column": (
        "LOSS",
        "return cross_entropy(network, batch)",
        7,
        "in loss: KeyError: 'image'. A batch has the columns x, label.",
    ),
    "an exception in the loss": (
        "LOSS",
        'raise ValueError("no loss today")',
        1,
        "in loss: ValueError: no",
    ),
    "an exception in the model": (
        "FORWARD",
        "return self.inner(x[:, :2])",
        2,
        "in forward: module inner, Linear(in_features=4, out_features=3, bias=True), was given [",
    ),
    "an exception in build_model": (
        "BUILD",
        "return Model(7)",
        1,
        "in build: TypeError: Model.",
    ),
    "an exception in a transform": (
        "TRANSFORM",
        "return batch | {'x': batch['y']}",
        7,
        "in transform: KeyError: 'y'. A batch has the columns x, label.",
    ),
    "sys.exit in the loss": ("LOSS", "raise SystemExit(0)", 1, "in loss. Only the launcher ends a run"),
}


def written(directory: Path, mark: str, text: str) -> tuple[Path, int]:
    """The recipe with that line in place of the marked one: its file, and the number of the line."""
    lines = RECIPE.splitlines()
    (number,) = (number for number, line in enumerate(lines) if line.endswith(f"# {mark}"))
    lines[number] = lines[number][: len(lines[number]) - len(lines[number].lstrip())] + text
    file = directory / "mistaken.py"
    file.write_text("\n".join(lines))
    return file, number + 1


def assert_told_once(ended: Ended, text: str, code: int, tracebacks: int = 0) -> None:
    """One sentence; before it the traceback of an exception that the sentence does not explain."""
    assert set(ended.codes) == {code}, ended
    assert sum(output.count(text) for output in ended.outputs) == 1, ended
    assert sum(output.count("Traceback (most") for output in ended.outputs) == tracebacks, ended
    trace = "".join(ended.outputs).partition("Traceback (most")[2].partition("\nerror: ")[0]
    before_last = [line for line in trace.splitlines() if line.startswith("  File ")][:-1]
    assert not any(f"{PACKAGE}/" in line for line in before_last), "of ours only the line that raised"
    assert "site-packages/torch/nn/modules/module.py" not in trace
    assert (ended.result["state"], ended.result["exit"]) == ("failed", code)
    assert (ended.status["state"], ended.status["exit"]) == ("failed", code)
    assert text in ended.result["error"]


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize(("mark", "line", "code", "text"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_with_its_line(tmp_path: Path, mark, line, code, text) -> None:
    file, number = written(tmp_path, mark, line)
    ended = run(tmp_path / "run", f"recipes.path={file}", *WORDS)
    where = f" called sys.exit({line[17:-1]}) at {file}:" if "SystemExit" in line else f" failed at {file}:"
    explained = code in (2, 7) or " instead" in text or "SystemExit" in line
    assert_told_once(ended, where, code, tracebacks=not explained)
    assert text in ended.result["error"]
    if not any(word in line for word in ("Linear", "Identity", "TensorData")):  # those fail elsewhere
        assert f"{where}{number}, in " in ended.result["error"]
    log = tmp_path / "run" / "logs" / "rank0.log"
    assert f"The full traceback is in {log}." in ended.result["error"]
    assert "Traceback (most recent call last)" in log.read_text()


def test_two_ranks_say_it_once(tmp_path: Path) -> None:
    file, number = written(tmp_path, "LOSS", "return cross_entropy(network, batch)")
    ended = run(tmp_path / "run", f"recipes.path={file}", *WORDS, ranks=2)
    assert_told_once(ended, f"failed at {file}:{number}, in loss: KeyError: 'image'.", 7)
    assert ended.result["error"].startswith("the recipe's loss failed at ")


def fail_alone(network: Any, batch: Any, passes: int, training: bool) -> None:
    if own_rank() == 1 and is_here(network, passes, training):
        raise DataError("the shard caf\udce9 is missing")  # as a name that is not UTF-8 is read


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["in a step", "in an evaluation"])
def test_a_mistake_of_another_rank_is_what_the_files_of_the_run_say(tmp_path: Path, training) -> None:
    """Rank 0 itself sees no more than a lost connection."""
    code = partial(fail_alone, passes=4 if training else 6, training=training)
    ended = run(tmp_path / "run", "train.max_steps=6", ranks=2, user_code=code)
    assert ended.codes == [7, 7], ended
    assert ended.outputs[0].count("error: ") == 1
    assert "error: rank 1 failed: the shard caf\\udce9 is missing" in ended.outputs[0]
    assert (ended.result["exit"], ended.status["exit"]) == (7, 7)
    assert ended.result["error"] == "rank 1 failed: the shard caf\\udce9 is missing"
    assert (ended.events("end")[-1]["exit"], ended.events("end")[-1]["error"]) == (7, ended.result["error"])


REFUSED: dict[str, tuple[str, int, str]] = {
    "an empty validation set": (
        "validation = TensorData({'x': x[:0], 'label': torch.arange(0)})",
        7,
        "the validation set of the recipe is empty",
    ),
    "labels beyond the classes": (
        "train.columns['label'][5] = 3",
        7,
        "column label of sample 5 is 3, but the recipe names 3 classes: a label must lie between 0 and 2.",
    ),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("line", "code", "text"), REFUSED.values(), ids=REFUSED)
def test_data_that_cannot_be_evaluated_is_refused_at_the_start(tmp_path: Path, line, code, text) -> None:
    file, _ = written(tmp_path, "RECIPE", line)
    ended = run(tmp_path / "run", f"recipes.path={file}", *WORDS)
    assert_told_once(ended, text, code)
    assert not ended.events("start")


def test_the_parent_says_it_once(tmp_path: Path) -> None:
    write_recipe(tmp_path, in_step="raise ValueError('no loss today')")
    with Parent(tmp_path) as parent:
        assert parent.end() == 1
        assert "no loss today" not in parent.stdout
        trace, _, error = parent.stderr.partition("\nValueError: no loss today\nerror: ")
        assert trace.startswith("Traceback (most recent call last):\n")
        assert trace.count("Traceback") == 1
        assert trace.count("  File ") == 2, "the loss, and in_step which it calls"
        assert error.startswith("the recipe's loss failed at "), "all ranks, not one of them"
        assert len(error.strip().splitlines()) == 1, error
        logs = parent.run_dir / "logs"
        assert re.search(rf"in {logs}/rank[01].log; logs of the other ranks: {logs}/rank[01].log\.$", error)
        assert "ValueError: no loss today" in parent.json("result.json")["error"]


# The mark of the line that is replaced, its text, and what the message says.
UNTRAINABLE: dict[str, tuple[str, str, str]] = {
    "a loss for each sample": (
        "LOSS",
        "return Loss(network(batch['x']).float().sum(1), 32, None)",
        "the recipe's loss returned a Loss(float32 [",
    ),
}


@pytest.mark.parametrize(("mark", "line", "text"), UNTRAINABLE.values(), ids=UNTRAINABLE)
def test_what_no_run_can_train_is_one_sentence(tmp_path: Path, mark, line, text) -> None:
    file, _ = written(tmp_path, mark, line)
    ended = run(tmp_path / "run", f"recipes.path={file}", *WORDS, "data.batch_size=32")
    assert_told_once(ended, text, 2)


ALONE = """
    import os, time
    if os.environ["RANK"] == "1":
        raise ValueError("no data here")
    time.sleep(SECONDS)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 7], ids=["rank 0 waits for it", "rank 0 is busy"])
def test_under_torchrun_the_error_of_one_rank_is_said(tmp_path: Path, seconds: int) -> None:
    """By rank 0; where it does not hear of it within some seconds by the rank itself, and by rank 0 later."""
    file, _ = written(tmp_path, "RECIPE", ALONE.replace("SECONDS", str(seconds)))
    done = launch(tmp_path, ["recipe=resnet18", f"recipes.path={file}", *WORDS, "tracker=none"])
    most = 2 if seconds else 1
    assert 1 <= done.stderr.count("ValueError: no data here\n") <= most, done.stderr
    assert 1 <= done.stderr.count("error: ") <= most, done.stderr
    result = read_json(only_run(tmp_path) / "result.json")
    assert result["error"].startswith("rank 1 failed: the function under @recipe")


def test_the_events_of_a_run_whose_other_rank_failed_end_with_its_error(tmp_path: Path) -> None:
    write_recipe(tmp_path, in_step="if RANK == 1: raise ValueError('no loss today')")
    with Parent(tmp_path) as parent:
        assert parent.end() == 1
        ended = read_events(parent.run_dir / "metrics.jsonl")[-1]
        assert ended["error"] == parent.json("result.json")["error"]
        assert "ValueError: no loss today" in ended["error"]


@pytest.mark.parametrize("words", [["launch.nproc=2"], ["launch.nproc=3"]])
def test_a_batch_smaller_than_the_ranks_is_refused_before_a_worker_starts(tmp_path: Path, words) -> None:
    write_recipe(tmp_path)
    with Parent(tmp_path, "data.batch_size=1", *words) as parent:
        assert parent.end() == 2
        assert "data.batch_size=1 is less than the number of ranks, " in parent.stderr
        assert not (tmp_path / "outputs").exists()
