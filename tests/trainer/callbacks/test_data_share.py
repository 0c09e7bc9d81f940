"""Shares of batches: passes of two samples, and what a checkpoint keeps of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.telemetry import Telemetry
from launcher.trainer.callbacks.data_share import DataShare
from tests.trainer.callbacks.test_step_logger import Recorder
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone


def share_of(batch_size: int, micro_batch: int, recorder: Recorder | None = None) -> DataShare:
    context = context_alone(Telemetry([recorder or Recorder()]), LIMITS, 1)
    context.plan = replace(
        context.plan, num_samples=64, batch_size=batch_size, micro_batch=micro_batch, world_size=2
    )
    return DataShare(context)


@pytest.mark.parametrize(("speeds", "shares"), [([3.0, 1.0], (12, 4)), ([9.0, 5.0], (10, 6))])
def test_passes_of_two_have_even_shares(speeds, shares) -> None:
    assert share_of(16, 2)._shares(speeds) == shares


def test_a_batch_that_passes_of_two_do_not_divide_stays_equal_and_that_is_said_once() -> None:
    recorder = Recorder()
    part = share_of(15, 2, recorder)
    assert [part._shares([3.0, 1.0]) for _ in range(2)] == [None, None]
    (said,) = recorder.of("decision")
    assert "the batch has 15 samples" in said["text"]


@pytest.mark.parametrize(("micro_batch", "most"), [(4, [4, 16]), (2, [16, 16])])
def test_a_lack_of_memory_is_remembered_while_the_micro_batch_stays(micro_batch, most) -> None:
    part = share_of(16, micro_batch)
    part.load_state_dict({"shares": (), "most": [4, 16], "most_per_pass": 4})
    assert part.state_dict() == {"shares": (), "most": most, "most_per_pass": micro_batch}
