"""A run that is not whole is not called done: nothing was learned, or its last checkpoint is missing."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.launching import Ended, run
from tests.faults.parent import Parent, write_recipe
from tests.faults.test_damaged_runs import full_disk
from tests.faults.usercode import own_rank, slowly

pytestmark = pytest.mark.timeout(90)

LAST = 12  # steps of the runs here
WORDS = (f"train.max_steps={LAST}",)


def poison(network: Any, batch: Any, first_pass: int, training: bool = True, rank: int = 0) -> None:
    """NaN for the samples of one rank from this forward pass in training on, or in evaluations after it."""
    here = network is not None and network.training == training and int(network.passes) >= first_pass
    if here and own_rank() == rank:
        batch["x"].fill_(math.nan)


def assert_diverged(ended: Ended, text: str) -> None:
    assert set(ended.codes) == {5}, ended
    assert text in ended.result["error"]
    assert (ended.result["state"], ended.result["exit"]) == ("failed", 5)
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 5)
    assert [event["state"] for event in ended.events("end")] == ["failed"]
    assert "done" not in ended.outputs[0].replace("so the run is not done", "")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_last_loss_that_is_not_finite_is_no_good_end(tmp_path: Path, undisturbed, ranks) -> None:
    """What was saved before stays, and the same command ends as if nothing had happened."""
    code = partial(poison, first_pass=LAST - 1, rank=ranks - 1)
    ended = run(tmp_path / "run", *WORDS, ranks=ranks, user_code=code)
    assert_diverged(
        ended,
        "the loss was not finite in 1 of the last steps, none of which was applied, so the run is not done.",
    )
    assert f"  rank {ranks - 1}: training sample" in ended.result["error"]
    assert list(ended.checkpoints) == [5, 10]
    again = run(tmp_path / "run", *WORDS, ranks=ranks)
    assert again.digest == undisturbed(*WORDS, ranks=ranks).digest
    assert again.events("start")[-1]["step"] == 10


def test_a_run_of_which_no_step_was_applied_is_not_done(tmp_path: Path) -> None:
    words = ("train.max_steps=3", "precision.loss_scale.init_scale=16777216")
    ended = run(tmp_path / "run", *words, ranks=2)
    assert_diverged(ended, "none of 3 steps was applied, because every gradient overflowed")
    assert not ended.checkpoints


def test_the_parent_says_the_same(tmp_path: Path) -> None:
    write_recipe(
        tmp_path,
        in_build="model = nn.Linear(4, 2)\n"
        "model.register_forward_hook(lambda module, inputs, output: output * float('nan'))\n"
        "return model",
    )
    with Parent(tmp_path, "train.max_steps=3") as parent:
        assert parent.end() == 5
        assert "the loss was not finite in 3 of the last steps, none of which was applied" in parent.stderr
        for name in ("result.json", "status.json"):
            assert (parent.json(name)["state"], parent.json(name)["exit"]) == ("failed", 5)


# The last checkpoint cannot be written


def slowly_fill(network: Any, batch: Any, begins: int, ends: int) -> None:
    """Each step leaves time for the checkpoint before it."""
    slowly(network, batch)
    full_disk(network, batch, begins, ends)


def assert_not_saved(ended: Ended) -> None:
    assert set(ended.codes) == {8}, ended
    assert f"the checkpoint of step {LAST} cannot be written" in ended.result["error"]
    assert (ended.result["state"], ended.result["exit"]) == ("failed", 8)
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 8)
    assert 5 in ended.checkpoints
    assert LAST not in ended.checkpoints
    assert "done after" not in ended.outputs[0]


@pytest.mark.parametrize(
    ("ranks", "on_error"), [pytest.param(1, "stop", marks=pytest.mark.slow), (2, "warn")]
)
def test_with_room_again_the_same_command_makes_up_for_a_full_disk(
    tmp_path: Path, undisturbed, ranks, on_error
) -> None:
    words = (*WORDS, "train.log_every_steps=1000", f"checkpoint.on_error={on_error}")
    code = partial(slowly_fill, begins=LAST - 1, ends=1000)
    ended = run(tmp_path / "run", *words, ranks=ranks, user_code=code)
    assert_not_saved(ended)
    newest = max(ended.checkpoints)
    again = run(tmp_path / "run", *words, ranks=ranks)
    assert again.digest == undisturbed(*WORDS, ranks=ranks).digest
    assert (again.status["state"], again.result["state"]) == ("done", "done")
    assert again.events("start")[-1]["step"] == newest
    assert list(again.checkpoints) == [5, 10, LAST]
