"""What is recorded of each step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from launcher.engine import StepReport
from launcher.errors import DivergedError
from launcher.telemetry import Telemetry
from launcher.telemetry.events import Event, record_of
from launcher.telemetry.stream import Sink
from launcher.telemetry.tracker.rows import media_of, scalars_of
from launcher.trainer.callback import Callback
from launcher.trainer.callbacks.fp32_fallback import Fp32Fallback
from launcher.trainer.callbacks.gradient_histogram import GradientHistogram
from launcher.trainer.callbacks.overflow_logger import OverflowLogger
from launcher.trainer.callbacks.step_logger import StepLogger
from launcher.trainer.callbacks.terminate_on_nonfinite import TerminateOnNonFinite
from launcher.trainer.callbacks.throughput_totals import ThroughputTotals
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepFlag, StepIndex
from tests.trainer.reports import CLEAN, LIMITS, OVERFLOW, metrics_of
from tests.trainer.runs import context_alone

GRADIENTS = {"fc.weight": torch.tensor([[0.0, 1.0], [-2.0, 20000.0]]).half(), "fc.bias": torch.ones(4)}


class Ready:
    """A step whose numbers are on the host already."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def read(self) -> StepReport:
        return self.report


class Recorder(Sink):
    name = "recorder"

    def __init__(self) -> None:
        self.events: list[dict] = []

    def write(self, event: Event) -> None:
        self.events.append(record_of(event))

    def close(self) -> None:
        pass

    def of(self, event: str) -> list[dict]:
        return [record for record in self.events if record["event"] == event]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


class Inspector:
    """Answers without a second look."""

    def broken_weights(self) -> str:
        return ""

    def explain(self, *question) -> str:
        return "seen again"


class Searcher:
    """Of a run without precision.fp32_fallback."""


def run_of(
    recorder: Recorder,
    reports: list[StepReport],
    every: int = 2,
    gradients_every: int | None = None,
    first_step_done: Callable[[], None] | None = None,
    starts: bool = False,
) -> TrainContext:
    """A run whose callbacks have seen these steps, of which the first is the process's if it `starts`."""
    run = context_alone(Telemetry([recorder]), LIMITS, every)
    callbacks: list[Callback] = [Fp32Fallback(run, cast(Any, Searcher())), OverflowLogger(run)]
    if gradients_every:
        stats = GradientHistogram(run, gradients_every)
        stats._gradients = lambda: GRADIENTS
        callbacks.append(stats)
    callbacks.append(TerminateOnNonFinite(LIMITS, Inspector(), run.stepper.counters))
    callbacks += [ThroughputTotals(run), (log := StepLogger(run))]
    if first_step_done is not None:
        run.step_reader._first_step_done = first_step_done
    if not starts:
        run.step_reader._is_first, log._last = False, StepIndex(0, 0, 0)
    run.callbacks.fill(callbacks)
    for step, report in enumerate(reports, 1):
        index, result = StepIndex(0, step - 1, step), cast(Any, Ready(report))
        run.callbacks.on_step_launched(index, result)
        run.step_reader.push(index, result)
    return run


def test_a_step_is_reported_one_step_late(recorder) -> None:
    run = run_of(recorder, [CLEAN] * 4)
    assert [event["step"] for event in recorder.of("step")] == [2]
    run.step_reader.flush_all()
    assert [event["step"] for event in recorder.of("step")] == [2, 4]


def test_the_first_step_of_a_process_is_reported_at_once(recorder) -> None:
    done: list[int] = []
    first = lambda: done.append(len(recorder.of("step")))  # noqa: E731
    run_of(recorder, [CLEAN] * 4, first_step_done=first, starts=True)
    assert done == [1]
    assert [event["step"] for event in recorder.of("step")] == [1, 2]


def test_flags_are_taken_from_the_reports(recorder) -> None:
    run = run_of(recorder, [CLEAN, replace(CLEAN, votes=(0, 2, *CLEAN.votes[2:]))])
    assert run.flags == set()
    run.step_reader.flush()
    assert run.flags == {StepFlag.SAVE}


def test_losses_are_averaged_by_their_counts_over_the_window(recorder) -> None:
    run = run_of(recorder, [CLEAN, replace(CLEAN, loss=5.0, count=16)])
    run.step_reader.flush_all()
    (event,) = recorder.of("step")
    assert event["loss"] == pytest.approx((2 * 8 + 5 * 16) / 24)
    assert event["compute_ms"] == 3.0
    assert (event["update_ms"], event["communication_ms"]) == (1.0, 0.0), "one rank has no wire"


def test_the_totals_of_a_run_are_those_of_all_its_steps(recorder) -> None:
    before, after = (ThroughputTotals(context_alone(Telemetry([recorder]), LIMITS, 2)) for _ in range(2))
    for step, samples in ((98, 8), (99, 5)):
        before.on_step_metrics(StepIndex(0, step, step + 1), metrics_of(CLEAN, samples))
    after.load_state_dict(before.state_dict())
    after.on_step_metrics(StepIndex(1, 0, 101), metrics_of(CLEAN))
    assert after.state_dict() == {"samples": 8 + 5 + 8, "seconds": 1.5}


@pytest.mark.parametrize("count", [1e-8, 512.0, 1e10])
def test_samples_are_those_of_the_data_set_whatever_the_loss_counts(recorder, count) -> None:
    """Tokens, pixels and weights are none: plan divides samples of the data set by the rate."""
    without_two = replace(CLEAN, count=count, votes=(0, 0, 0, 2, *CLEAN.votes[4:]))
    run_of(recorder, [replace(CLEAN, count=count), without_two]).step_reader.flush_all()
    (event,) = recorder.of("step")
    assert event["samples"] == 8 + 6
    assert event["samples_per_s"] == pytest.approx(14 / (2 * event["step_ms"] / 1000), rel=0.01)


def test_a_bad_loss_does_not_spoil_the_average(recorder) -> None:
    bad = replace(OVERFLOW, loss=float("nan"), bad_losses=1, bad_loss_steps=1)
    run_of(recorder, [CLEAN, bad]).step_reader.flush_all()
    assert recorder.of("step")[0]["loss"] == 2.0


def test_a_loss_that_is_not_finite_is_warned_of_once(recorder) -> None:
    """It is skipped as an overflow is, which is harmless: only the warning shows that the data is wrong."""
    bad = replace(OVERFLOW, loss=float("nan"), bad_losses=2, bad_loss_steps=1)
    run_of(recorder, [OVERFLOW, CLEAN, *[bad, CLEAN] * 2]).step_reader.flush_all()
    (warning,) = [event["text"] for event in recorder.of("warning")]
    assert warning == (
        "the loss of step 3 was not finite in 2 micro-batches, so the step was skipped. That is no "
        "overflow of the loss scale: check the samples for NaN and infinity, or lower optim.lr. Further "
        "steps are counted."
    )


def test_a_step_that_ends_the_run_is_recorded_before_it_raises(recorder) -> None:
    run = run_of(recorder, [CLEAN, replace(OVERFLOW, skips_at_min_scale=4)])
    with pytest.raises(DivergedError, match=r"overflowed in 4 steps with none applied between them"):
        run.step_reader.flush_all()
    assert [event["step"] for event in recorder.of("overflow")] == [2]


def test_a_skip_names_ranks_and_parameters(recorder) -> None:
    run_of(recorder, [OVERFLOW, CLEAN])
    (event,) = recorder.of("overflow")
    assert (event["step"], event["ranks"], event["parameters"]) == (1, [1], ["fc.weight"])


@pytest.mark.parametrize(
    ("every", "skipped", "told"),
    [
        (2, (), [2, 4, 6]),
        (3, (), [3, 6]),
        (3, (3, 4), [6]),  # a skipped step has nothing to show
        (1, (), [1, 2, 3, 4, 5, 6]),
        (7, (), []),
        (0, (), []),
        (None, (), []),
    ],
)
def test_gradients_are_told_every_so_many_steps(recorder, every, skipped, told) -> None:
    reports = [OVERFLOW if step in skipped else CLEAN for step in range(1, 7)]
    run_of(recorder, reports, gradients_every=every).step_reader.flush_all()
    assert [event["step"] for event in recorder.of("gradients")] == told


def test_a_resumed_run_tells_of_its_gradients_when_the_undisturbed_one_does(recorder) -> None:
    run = run_of(recorder, [], gradients_every=4)
    run.callbacks.on_train_start(6)
    for step in (7, 8, 9):
        index, result = StepIndex(0, step - 1, step), cast(Any, Ready(CLEAN))
        run.callbacks.on_step_launched(index, result)
        run.step_reader.push(index, result)
    run.step_reader.flush_all()
    assert [event["step"] for event in recorder.of("gradients")] == [8]


def test_gradients_are_told_by_layer_and_as_a_histogram(recorder) -> None:
    run_of(recorder, [CLEAN], gradients_every=1).step_reader.flush_all()
    (event,) = recorder.of("gradients")
    assert (event["scale"], event["epoch"], event["zeros"]) == (1024.0, 0, 1)
    assert event["layers"] == {
        "fc.weight": {"zero_share": 0.25, "zero_share_at_scale_1": 0.25, "near_max_share": 0.25},
        "fc.bias": {"zero_share": 0.0, "zero_share_at_scale_1": 0.0, "near_max_share": 0.0},
    }
    assert (event["zero_share"], event["near_max_share"]) == (1 / 8, 1 / 8)
    counts = dict(enumerate(event["histogram"], event["first_exponent"]))
    assert {exponent: count for exponent, count in counts.items() if count} == {0: 5, 1: 1, 14: 1}
    assert media_of(event)["gradients/exponents"].counts == event["histogram"]
    assert list(scalars_of(event)) == [
        "gradients/scale",
        "gradients/zero_share",
        "gradients/zero_share_at_scale_1",
        "gradients/near_max_share",
    ]
