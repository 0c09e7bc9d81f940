"""Shares of batches: what a checkpoint keeps of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.telemetry import Telemetry
from launcher.trainer.callbacks.data_share import DataShare
from tests.trainer.callbacks.test_step_logger import Recorder
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone


def share_of(batch_size: int, micro_batch: int) -> DataShare:
    context = context_alone(Telemetry([Recorder()]), LIMITS, 1)
    context.plan = replace(
        context.plan, num_samples=64, batch_size=batch_size, micro_batch=micro_batch, world_size=2
    )
    return DataShare(context)


@pytest.mark.parametrize(("micro_batch", "most"), [(4, [4, 16]), (2, [16, 16])])
def test_a_lack_of_memory_is_remembered_while_the_micro_batch_stays(micro_batch, most) -> None:
    part = share_of(16, micro_batch)
    part.load_state_dict({"shares": (), "most": [4, 16], "most_per_pass": 4})
    part.on_train_start(0)
    assert part.state_dict() == {"shares": (), "most": most, "most_per_pass": micro_batch}
