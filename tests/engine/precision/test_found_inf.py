"""The decision on a step: the same by the host's numbers and by tensors, for any totals and any state."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies
from torch import Tensor

from launcher.engine.limits import VOTES
from launcher.engine.precision.found_inf import (
    ABANDONED,
    NOT_FINITE,
    ON_DEVICE,
    ON_HOST,
    StepTotals,
    Verdict,
    judge,
)
from launcher.engine.precision.loss_scale import ScaleState, Scaling

P_N0 = 32.0
# samples, sum of losses, non-finite losses; squares; statuses of the ranks; the state of the loss scale
COUNTS = [
    (64.0, 32.0, 0.0),
    (64.0, math.nan, 1.0),
    (0.0, 0.0, 0.0),
    (math.inf, 1.0, 0.0),
    (math.nan, 1.0, 0.0),
]
SQUARES = [25.0, math.inf, math.nan, 0.0]
STATUSES = [(0, 0), (NOT_FINITE, 0), (0, ABANDONED), (ABANDONED, NOT_FINITE)]
STATES = [ScaleState(2.0**16, 0, 1, 3, 0, 0, 0), ScaleState(1.0, 1, 1, 9, 2, 1, 1)]


def totals_of(counts: Any, squares: float, statuses: Any) -> StepTotals:
    status = torch.tensor(statuses, dtype=torch.float64)
    each = torch.tensor([squares], dtype=torch.float64)
    return StepTotals(*counts, squares, max(statuses), [0.0] * VOTES, status, each)


def decide(
    totals: StepTotals,
    state: ScaleState,
    scaling: Scaling,
    p_n0: float = P_N0,
    clip_norm: float | None = None,
) -> Verdict:
    """On the host, after the tensors have been found to decide alike."""

    def placed(number: float) -> Tensor:
        return torch.tensor(number, dtype=torch.float64)

    found = judge(ON_HOST, totals, state, scaling, p_n0, clip_norm)
    other = judge(
        ON_DEVICE,
        totals._replace(
            **{
                name: placed(number)
                for name, number in totals._asdict().items()
                if not isinstance(number, Tensor | list)
            }
        ),
        ScaleState(*map(placed, state)),
        scaling,
        p_n0,
        clip_norm,
    )
    assert (found.skip, found.not_abandoned) == (bool(other.skip), bool(other.not_abandoned))
    assert [float(number) for number in found.state] == [number.item() for number in other.state]
    if not found.skip:
        values = [other.multiplier.item(), other.loss.item(), other.grad_norm.item()]
        expected = [found.multiplier, found.loss, found.grad_norm]
        assert values == pytest.approx(expected, rel=1e-6, nan_ok=True)
    return found


def test_only_a_finite_gradient_of_finite_losses_of_some_samples_is_applied() -> None:
    scaling = Scaling(growth_interval=2)
    for counts, squares, statuses, state in itertools.product(COUNTS, SQUARES, STATUSES, STATES):
        found = decide(totals_of(counts, squares, statuses), state, scaling)
        clean = math.isfinite(squares) and not counts[2] and 0 < counts[0] < math.inf
        assert found.skip == (not clean or ABANDONED in statuses)
        assert found.not_abandoned == (ABANDONED not in statuses)
        if not found.skip:
            assert found.multiplier == P_N0 / (state.scale * 64)
            assert found.grad_norm == found.multiplier * math.sqrt(squares)
            assert found.loss == 0.5
        if not found.not_abandoned:
            assert found.state == state


def test_a_clipped_gradient_has_the_norm_that_it_is_clipped_to() -> None:
    state = ScaleState(1.0, 0, 1, 0, 0, 0, 0)
    for clip_norm in (0.5, 5.0, 50.0):
        found = decide(totals_of((1.0, 1.0, 0.0), 25.0, (0,)), state, Scaling(), 1.0, clip_norm)
        assert found.grad_norm == 5.0
        assert found.multiplier == pytest.approx(min(1.0, clip_norm / 5.0), rel=1e-6)


NUMBERS = strategies.floats(0, 1e300) | strategies.sampled_from([math.inf, math.nan, 0.0])


@given(
    counts=strategies.tuples(NUMBERS, strategies.floats(), strategies.integers(0, 3).map(float)),
    squares=NUMBERS,
    statuses=strategies.lists(
        strategies.sampled_from([0, 0, 0, NOT_FINITE, ABANDONED]), min_size=1, max_size=4
    ),
    state=strategies.tuples(
        strategies.integers(0, 24).map(lambda exponent: 2.0**exponent),
        *[strategies.integers(0, 4)] * 2,
        *[strategies.integers(0, 9)] * 4,
    ),
    scaling=strategies.builds(
        Scaling,
        strategies.sampled_from(["dynamic", "static", "none"]),
        growth_interval=strategies.integers(1, 5),
        hysteresis=strategies.integers(1, 3),
    ),
    p_n0=strategies.integers(0, 20),
    clip_norm=strategies.none() | strategies.floats(1e-3, 1e3),
)
@example((2.3e-309, 0.0, 0.0), 0.0, [0], (2.0, *[0] * 6), Scaling("dynamic"), 0, None)  # a huge multiplier
def test_a_host_and_a_device_decide_alike_for_any_step(
    counts, squares, statuses, state, scaling, p_n0, clip_norm
) -> None:
    decide(totals_of(counts, squares, statuses), ScaleState(*state), scaling, 2.0**p_n0, clip_norm)
