"""What the monitor reports of each step, and when it ends a run."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from launcher.config.schema import ScaleConfig
from launcher.engine import StepReport
from launcher.errors import DataError, DivergedError
from launcher.telemetry import Telemetry
from launcher.telemetry.tracker.wandb_sink import history_row
from launcher.training.gradient_stats import GradientStats
from launcher.training.monitor import Monitor
from launcher.training.progress import Position, Totals
from launcher.training.run import Question, Votes
from tests.training.runs import run_alone

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
    votes=(0, 0, 0, 0),
    spans_ms={"compute": 3.0, "wire": 1.0},
)
GRADIENTS = {"fc.weight": torch.tensor([[0.0, 1.0], [-2.0, 20000.0]]).half(), "fc.bias": torch.ones(4)}
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


class Inspector:
    """Answers as given, and keeps what it was asked."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.asked: list[tuple] = []

    def broken_weights(self) -> str:
        return self.broken

    def explain(self, *question, backward: bool) -> str:
        self.asked.append((*question, backward))
        return "seen again"


def monitor_of(
    recorder: Recorder,
    reports: list[StepReport],
    every: int = 2,
    inspector: Inspector | None = None,
    gradients_every: int | None = None,
    limits: ScaleConfig = LIMITS,
    votes: Votes | None = None,
    first_step_done: Callable[[], None] | None = None,
) -> Monitor:
    run = run_alone(Telemetry([recorder]), limits, every)
    gradients = GradientStats(lambda: GRADIENTS, run.telemetry, gradients_every, torch.device("cpu"))
    monitor = Monitor(run, votes or Votes(), inspector or Inspector(), gradients, Totals(), first_step_done)
    for step, report in enumerate(reports, 1):
        monitor.record(Position(0, step - 1, step), Ready(report))
    return monitor


def test_a_step_is_reported_one_step_late(recorder) -> None:
    monitor = monitor_of(recorder, [CLEAN] * 4)
    assert [event["step"] for event in recorder.of("step")] == [2]
    monitor.log_remaining()
    assert [event["step"] for event in recorder.of("step")] == [2, 4]


def test_the_first_step_is_reported_at_once_where_somebody_waits_for_it(recorder) -> None:
    done: list[int] = []
    monitor_of(recorder, [CLEAN] * 4, first_step_done=lambda: done.append(len(recorder.of("step"))))
    assert done == [1]
    assert [event["step"] for event in recorder.of("step")] == [1, 2]


def test_votes_are_counted_from_the_reports(recorder) -> None:
    votes = Votes()
    monitor = monitor_of(recorder, [CLEAN, replace(CLEAN, votes=(0, 2, 0, 0))], votes=votes)
    assert votes.take() == set()
    monitor.flush()
    assert votes.take() == {Question.SAVE}
    assert votes.take() == set()


def test_losses_are_averaged_by_their_counts_over_the_window(recorder) -> None:
    monitor = monitor_of(recorder, [CLEAN, replace(CLEAN, loss=5.0, count=16)])
    monitor.log_remaining()
    (event,) = recorder.of("step")
    assert event["loss"] == pytest.approx((2 * 8 + 5 * 16) / 24)
    assert event["compute_ms"] == 3.0
    assert event["update_ms"] == 0.0
    assert monitor.totals.samples == 24
    assert monitor.totals.wire_bytes_per_step == 100


def test_a_bad_loss_does_not_spoil_the_average(recorder) -> None:
    bad = replace(OVERFLOW, loss=float("nan"), bad_losses=1, bad_loss_steps=1)
    monitor_of(recorder, [CLEAN, bad]).log_remaining()
    assert recorder.of("step")[0]["loss"] == 2.0


def test_a_skip_names_ranks_and_parameters(recorder) -> None:
    monitor_of(recorder, [OVERFLOW, CLEAN])
    (event,) = recorder.of("overflow")
    assert (event["step"], event["ranks"], event["parameters"]) == (1, [1], ["fc.weight"])


@pytest.mark.parametrize(
    ("report", "error", "words"),
    [
        (replace(OVERFLOW, bad_loss_steps=3), DivergedError, "the loss was not finite in 3 steps"),
        (replace(OVERFLOW, floor_skips=4), DivergedError, "(?s)overflowed in 4 steps in a row.*fc.weight"),
        (replace(OVERFLOW, count=0), DataError, "no sample on any rank"),
    ],
)
def test_a_run_that_cannot_recover_is_ended(recorder, report, error, words) -> None:
    monitor = monitor_of(recorder, [report])
    with pytest.raises(error, match=words):
        monitor.log_remaining()


@pytest.mark.parametrize("report", [replace(OVERFLOW, bad_loss_steps=2), replace(OVERFLOW, floor_skips=3)])
def test_a_run_below_the_limits_goes_on(recorder, report) -> None:
    monitor_of(recorder, [report, CLEAN]).log_remaining()


def test_the_end_tells_ranks_parameters_scales_and_what_was_seen_again(recorder) -> None:
    names = tuple(f"layer{number}.weight" for number in range(7))
    last = replace(OVERFLOW, scale=1.0, floor_skips=4, culprit_parameters=names)
    halved = [replace(CLEAN, scale=2.0**exponent) for exponent in range(12, 0, -1)]
    inspector = Inspector()
    monitor = monitor_of(recorder, [CLEAN, CLEAN, *halved, last], inspector=inspector)
    with pytest.raises(DivergedError) as caught:
        monitor.log_remaining()
    lines = str(caught.value).splitlines()
    assert lines[1].startswith("Gradient not finite on ranks [1], in parameters: layer0.weight")
    assert lines[1].endswith("and 2 more")
    assert lines[2].startswith("Loss scale: 512 from step 6, 256 from step 7")
    assert lines[2].endswith("1 from step 15")
    assert lines[3] == "seen again"
    assert inspector.asked == [(0, 15, (1,), True)]  # the losses were finite: the backward pass is to blame


def test_a_bad_loss_over_broken_weights_ends_the_run_at_once(recorder) -> None:
    bad = replace(OVERFLOW, bad_losses=1, bad_loss_steps=1)
    monitor = monitor_of(recorder, [bad], inspector=Inspector("conv1.weight (master inf)"))
    with pytest.raises(DivergedError, match=r"step 1, because weights are not: conv1\.weight \(master inf\)"):
        monitor.log_remaining()


def test_an_overflow_is_no_reason_to_look_at_the_weights(recorder) -> None:
    monitor_of(recorder, [OVERFLOW, CLEAN], inspector=Inspector("never asked")).log_remaining()


@pytest.mark.parametrize(
    ("every", "skipped", "told"),
    [
        (2, (), [2, 4, 6]),
        (3, (), [3, 6]),
        (3, (3, 4), [5, 6]),  # a skipped step has nothing to show: the next clean one is reported instead
        (1, (), [1, 2, 3, 4, 5, 6]),
        (7, (), []),
        (0, (), []),
        (None, (), []),
    ],
)
def test_gradients_are_told_every_so_many_clean_steps(recorder, every, skipped, told) -> None:
    reports = [OVERFLOW if step in skipped else CLEAN for step in range(1, 7)]
    monitor_of(recorder, reports, gradients_every=every).log_remaining()
    assert [event["step"] for event in recorder.of("gradients")] == told


def test_gradients_are_told_by_layer_and_as_a_histogram(recorder) -> None:
    monitor_of(recorder, [CLEAN], gradients_every=1).log_remaining()
    (event,) = recorder.of("gradients")
    assert (event["scale"], event["epoch"], event["zeros"]) == (1024.0, 0, 1)
    assert event["layers"] == {
        "fc.weight": {"zero_share": 0.25, "zero_share_at_scale_1": 0.25, "near_max_share": 0.25},
        "fc.bias": {"zero_share": 0.0, "zero_share_at_scale_1": 0.0, "near_max_share": 0.0},
    }
    assert (event["zero_share"], event["near_max_share"]) == (1 / 8, 1 / 8)
    counts = dict(enumerate(event["histogram"], event["first_exponent"]))
    assert {exponent: count for exponent, count in counts.items() if count} == {0: 5, 1: 1, 14: 1}
    assert list(history_row(event)) == [
        "step",
        "gradients/scale",
        "gradients/zero_share",
        "gradients/zero_share_at_scale_1",
        "gradients/near_max_share",
    ]


@pytest.mark.parametrize(
    ("mode", "least", "words"),
    [
        ("dynamic", 1, r"at loss scale 1024, the smallest allowed, .*Lower optim.lr or the loss"),
        ("auto", 64, r"the smallest allowed, .*Lower precision.scale.min, too"),
        ("static", 1, r"at the constant loss scale 1024, .*precision.scale.init.*mode=dynamic"),
        ("none", 1, r"in a row without a loss scale, .*wire.dtype=fp32"),
    ],
)
def test_the_advice_at_the_floor_is_about_the_scale_that_there_is(recorder, mode, least, words) -> None:
    limits = replace(LIMITS, mode=mode, min=least)
    monitor = monitor_of(recorder, [replace(OVERFLOW, floor_skips=4)], limits=limits)
    with pytest.raises(DivergedError, match=words):
        monitor.log_remaining()
