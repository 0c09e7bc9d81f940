"""data.max_bad_samples: counts the samples of an epoch, also over a resume within it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from launcher.errors import DataError
from launcher.telemetry import Telemetry
from launcher.trainer.callbacks.bad_samples import BadSampleLimit
from launcher.trainer.progress import StepFlag, StepIndex
from tests.trainer.callbacks.test_step_logger import Recorder
from tests.trainer.reports import CLEAN, LIMITS, metrics_of
from tests.trainer.runs import context_alone


def part_of(max_bad_samples: int, saved: str | None = None) -> tuple[BadSampleLimit, Recorder]:
    recorder = Recorder()
    run = context_alone(Telemetry([recorder]), LIMITS, 1)
    data = replace(run.config.data, max_bad_samples=max_bad_samples)
    part = BadSampleLimit(replace(run, config=replace(run.config, data=data)))
    if saved is not None:
        part.load_state_dict(json.loads(saved))
    return part, recorder


def take(part: BadSampleLimit, step: int, bad: int) -> None:
    """Step `step` of epochs of 4 steps, counted from 1."""
    votes = [0] * len(CLEAN.votes)
    votes[StepFlag.BAD_SAMPLES] = bad
    part.on_step_metrics(
        StepIndex(*divmod(step - 1, 4), step), metrics_of(replace(CLEAN, votes=tuple(votes)))
    )


def test_a_sample_that_cannot_be_read_is_left_out_in_each_epoch() -> None:
    part, recorder = part_of(1)
    for step in range(1, 13):
        take(part, step, int(step in (3, 7, 9)))
    texts = [record["text"] for record in recorder.of("warning")]
    assert texts[1].startswith("1 training sample of epoch 2 could not be read by step 7 (1 of them in this")
    assert len(texts) == 3


@pytest.mark.parametrize("resumed", [False, True])
def test_one_sample_too_many_within_an_epoch_ends_the_run(resumed) -> None:
    part, _ = part_of(3)
    take(part, 1, 3)
    take(part, 6, 2)
    if resumed:
        part, _ = part_of(3, json.dumps(part.state_dict()))
    take(part, 7, 1)
    with pytest.raises(
        DataError, match=r"^4 training samples of epoch 2 .* more than data.max_bad_samples=3"
    ):
        take(part, 8, 1)
