"""Steps far above those before are skipped: the rule, what a skip changes, and a resume of the statistics."""

from __future__ import annotations

import random
import statistics

import pytest
import torch
from torch import Tensor

from launcher.engine import SGD, Policy, Scaling, SkipOutliers, Stepper, StepReport, UnusableError
from launcher.engine.precision.outliers import MOST_IN_A_ROW, OutlierStatistics
from tests.engine.observe import deciding_on_device, flat_tensors, state_digest
from tests.models import Planted

CPU = torch.device("cpu")


def reference(history: list[tuple[float, float]], step: tuple[float, float], window: int) -> bool:
    """The rule written out, for three deviations."""
    recent = history[-window:]
    if 2 * len(recent) < window:
        return False
    return any(
        value > statistics.fmean(before) + max(3 * statistics.pstdev(before), 1e-3 * statistics.fmean(before))
        for value, before in zip(step, zip(*recent, strict=True), strict=True)
    )


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("window", [8, 15, 32])
def test_the_rule_is_that_of_the_last_applied_steps(window: int, on_host: bool) -> None:
    draw = random.Random(window)
    found = OutlierStatistics(SkipOutliers(3.0, window), CPU, on_host)
    history: list[tuple[float, float]] = []
    seen = set()
    for number in range(200):
        pair = draw.gauss(4 if number % 9 else 12, 1), draw.gauss(2 if number % 13 else 20, 0.1)
        applied = draw.random() > 0.1  # others overflow
        given = pair if on_host else tuple(torch.tensor(each, dtype=torch.float64) for each in pair)
        outlier = found.is_outlier(*given)
        assert bool(outlier) == reference(history, pair, window)
        skip = not applied or bool(outlier)
        found.record(*given, skip, applied and bool(outlier))
        seen.add(bool(outlier))
        if not skip:
            history.append(pair)
    assert seen == {True, False}


def stepper_of(window: int = 8) -> Stepper:
    """Whose loss and gradient are what a test wants."""
    return Stepper(
        Planted(),
        SGD(0.001, 0.9),
        Policy.fp16(),
        scaling=Scaling(init=64, growth_interval=3),
        reference_count=1,
        skip_outliers=SkipOutliers(6.0, window),
    )


def step(stepper: Stepper, gradient: float, loss: float = 1.0) -> StepReport:
    with stepper.forward():
        out: Tensor = stepper.model(gradient, gradient)
    stepper.backward(out - out.detach() + loss, 1)
    return stepper.step().read()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("gradient", "loss"), [(50.0, 1.0), (1.0, 50.0)], ids=["gradient", "loss"])
def test_an_outlier_is_skipped_and_changes_neither_weights_nor_the_scale(on_device, gradient, loss) -> None:
    with deciding_on_device(on_device):
        stepper = stepper_of()
        for value in (1.0, 1.1, 0.9, 1.0):
            assert not step(stepper, value, value).skipped
        before, counters = state_digest(stepper), stepper.counters()
        report = step(stepper, gradient, loss)
        assert (report.skipped, report.outlier) == (True, True)
        assert (report.culprit_ranks, report.culprit_parameters) == ((), ())
        assert state_digest(stepper) == before
        assert stepper.counters() == counters | {"skipped_steps": 1}
        after = step(stepper, 1.0)
        assert (after.skipped, after.outlier) == (False, False)


def test_an_overflow_is_no_outlier_and_a_lasting_rise_is_applied_in_the_end() -> None:
    stepper = stepper_of()
    for value in (1.0, 1.1, 0.9, 1.0):
        step(stepper, value)
    overflow = step(stepper, 1e6)
    assert (overflow.skipped, overflow.outlier) == (True, False)
    assert stepper.loss_scale == overflow.scale / 2
    outliers = [step(stepper, 50.0).outlier for _ in range(MOST_IN_A_ROW + 1)]
    assert outliers == [True] * MOST_IN_A_ROW + [False]


@pytest.mark.parametrize("usual", [0.0, 0.1, 3.0])
def test_values_without_spread_make_no_outlier_and_nearly_none_only_of_a_real_rise(usual: float) -> None:
    found = OutlierStatistics(SkipOutliers(6.0, 8), CPU, on_host=True)
    for _ in range(7):  # whose mean is rounded
        found.record(usual, usual, False, False)
    assert not found.is_outlier(usual + 1, usual + 1)
    found.record(usual * (1 + 1e-6), usual, False, False)
    assert not found.is_outlier(usual * 1.0005, usual)
    assert found.is_outlier(usual * 2, usual) == (usual > 0)


def test_a_resumed_run_judges_by_the_same_statistics() -> None:
    whole, resumed = stepper_of(), stepper_of()
    for value in (1.0, 1.1, 0.9, 1.0, 50.0):
        step(whole, value)
    resumed.load_state_dict(whole.state_dict())
    assert resumed.state().outliers == whole.state().outliers
    for value in (1.2, 50.0, 1.0, 1.3):
        assert step(resumed, value).outlier == step(whole, value).outlier == (value == 50.0)
    one, other = flat_tensors(whole.state()), flat_tensors(resumed.state())
    assert all(torch.equal(one[key], other[key]) for key in one)
    wider = stepper_of(window=12)
    wider.load(whole.state())
    assert wider.state().outliers == whole.state().outliers


@pytest.mark.parametrize(("deviations", "window"), [(0.0, 128), (float("nan"), 128), (6.0, 7), (6.0, 8.5)])
def test_other_numbers_are_refused(deviations, window) -> None:
    with pytest.raises(UnusableError, match=r"SkipOutliers (deviations|window)="):
        SkipOutliers(deviations, window)
