"""What the watch tells of each step, and when it ends a run."""

from dataclasses import replace

import pytest
import torch

from launcher.config import ScaleConfig
from launcher.engine import StepReport
from launcher.errors import DataError, DivergedError
from launcher.telemetry import Telemetry
from launcher.watch import Moment, Watch

LIMITS = ScaleConfig(
    mode="dynamic",
    init=65536,
    growth_interval=2000,
    hysteresis=1,
    min=1,
    max=2**24,
    max_bad_losses=3,
    max_floor_skips=4,
)
CLEAN = StepReport(
    loss=2.0,
    grad_norm=1.0,
    scale=1024.0,
    lr=0.1,
    count=8,
    skipped=False,
    bad_losses=0,
    applied_steps=1,
    skipped_steps=0,
    floor_skips=0,
    bad_loss_steps=0,
    wire_bytes=100,
    culprit_ranks=(),
    culprit_parameters=(),
    spans_ms={"compute": 3.0, "wire": 1.0},
)
OVERFLOW = replace(
    CLEAN, skipped=True, skipped_steps=1, culprit_ranks=(1,), culprit_parameters=("fc.weight",)
)


class Ready:
    """A step whose numbers are on the host already."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def read(self) -> StepReport:
        return self.report


class Recorder:
    name = "recorder"

    def __init__(self) -> None:
        self.events: list[dict] = []

    def write(self, record) -> None:
        self.events.append(dict(record))

    def close(self) -> None:
        pass

    def of(self, event: str) -> list[dict]:
        return [record for record in self.events if record["event"] == event]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def watch_over(recorder: Recorder, reports: list[StepReport], every: int = 2) -> Watch:
    watch = Watch(Telemetry([recorder]), LIMITS, every, torch.device("cpu"))
    for step, report in enumerate(reports, 1):
        watch.see(Moment(0, step), Ready(report))
    return watch


def test_a_step_is_reported_one_step_late(recorder) -> None:
    watch = watch_over(recorder, [CLEAN] * 4)
    assert [event["step"] for event in recorder.of("step")] == [2]
    watch.catch_up()
    assert [event["step"] for event in recorder.of("step")] == [2, 4]


def test_losses_are_averaged_by_their_counts_over_the_window(recorder) -> None:
    watch = watch_over(recorder, [CLEAN, replace(CLEAN, loss=5.0, count=16)])
    watch.catch_up()
    (event,) = recorder.of("step")
    assert event["loss"] == pytest.approx((2 * 8 + 5 * 16) / 24)
    assert event["compute_ms"] == 3.0
    assert event["update_ms"] == 0.0
    assert watch.totals.samples == 24
    assert watch.totals.wire_bytes_per_step == 100


def test_a_bad_loss_does_not_spoil_the_average(recorder) -> None:
    bad = replace(OVERFLOW, loss=float("nan"), bad_losses=1, bad_loss_steps=1)
    watch_over(recorder, [CLEAN, bad]).catch_up()
    assert recorder.of("step")[0]["loss"] == 2.0


def test_a_skip_names_ranks_and_parameters(recorder) -> None:
    watch_over(recorder, [OVERFLOW, CLEAN])
    (event,) = recorder.of("overflow")
    assert (event["step"], event["ranks"], event["parameters"]) == (1, [1], ["fc.weight"])


@pytest.mark.parametrize(
    ("report", "error", "words"),
    [
        (replace(OVERFLOW, bad_loss_steps=3), DivergedError, "the loss was not finite in 3 steps"),
        (replace(OVERFLOW, floor_skips=4), DivergedError, "overflowed in 4 steps in a row.*fc.weight"),
        (replace(OVERFLOW, count=0), DataError, "no sample on any rank"),
    ],
)
def test_a_run_that_cannot_recover_is_ended(recorder, report, error, words) -> None:
    watch = watch_over(recorder, [report])
    with pytest.raises(error, match=words):
        watch.catch_up()


@pytest.mark.parametrize("report", [replace(OVERFLOW, bad_loss_steps=2), replace(OVERFLOW, floor_skips=3)])
def test_a_run_below_the_limits_goes_on(recorder, report) -> None:
    watch_over(recorder, [report, CLEAN]).catch_up()
