"""Runs that end because their metric no longer improves: when, with what, and after a restart."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.launching import Ended, run
from tests.faults.test_resuming import kill_before_the_result

# No loss improves by 10, so the first of the evaluations stays the best.
NEVER = ("train.max_steps=12", "train.eval_every_steps=2", "early_stopping.min_delta=10")


def evaluated(ended: Ended) -> list[int]:
    return [event["step"] for event in ended.events("eval")]


@pytest.mark.slow
def test_it_ends_after_the_same_evaluation_when_it_was_killed_at_its_end(tmp_path: Path) -> None:
    words = (*NEVER, "early_stopping.patience=2")
    ended = run(tmp_path / "run", *words, ranks=2, prepare=kill_before_the_result)
    assert -signal.SIGKILL in ended.codes
    again = run(tmp_path / "run", *words, ranks=2)
    assert again.codes == [0, 0], again
    assert evaluated(again) == [2, 4, 6]
    assert again.result["steps"] == 6
    assert again.result["state"] == again.status["state"] == "done"
    early = again.result["stopped_early"]
    assert early["reason"].startswith("val_loss has not improved by more than 10 in 2 evaluations: 1.")
    assert again.events("end")[-1]["reason"] == early["reason"]
    assert max(again.checkpoints) == 6

    third = run(tmp_path / "run", *words)
    assert third.codes == [0]
    assert "the run is done, after 6 steps" in third.outputs[0]
    assert "To train longer, raise early_stopping.patience." in third.outputs[0]


@pytest.mark.slow
def test_a_resume_in_between_and_a_higher_patience_continue_the_count(tmp_path: Path) -> None:
    words = (*NEVER, "checkpoint.every_steps=1")
    whole = run(tmp_path / "whole", *words, "early_stopping.patience=3")
    assert evaluated(whole) == [2, 4, 6, 8]
    for step in (3, 5, 7):
        start = f"checkpoint.resume={whole.checkpoints[step]}"
        resumed = run(tmp_path / f"from{step}", *words, "early_stopping.patience=3", start)
        assert resumed.result["steps"] == 8
        assert resumed.digest == whole.digest
        assert resumed.result["stopped_early"] == whole.result["stopped_early"]
    longer = run(tmp_path / "whole", *words, "early_stopping.patience=4")
    assert evaluated(longer) == [2, 4, 6, 8, 10]
    assert longer.result["steps"] == 10
    to_the_end = run(tmp_path / "whole", *words)
    assert to_the_end.result["steps"] == 12
    assert "stopped_early" not in to_the_end.result


@pytest.mark.slow
def test_a_metric_that_evaluations_do_not_have_is_refused_before_the_first_step(tmp_path: Path) -> None:
    words = ("early_stopping.patience=2", "early_stopping.metric=accuracy")
    ended = run(tmp_path / "run", *NEVER, *words, ranks=2)
    assert ended.codes == [2, 2]
    text = "early_stopping.metric=accuracy: the evaluations of this recipe have no such metric."
    assert text in ended.outputs[0]
    assert ended.events("eval") == []
