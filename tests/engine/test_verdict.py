"""The judgement of a step: the same bits on the host, in tensors and from the compiler that a GPU has."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given, strategies
from torch import Tensor

from launcher.engine.precision.loss_scale import Scaling, with_scale
from launcher.engine.verdict import Numbers, Rules, Terms, Verdict, judge, judge_on_host, next_rate
from launcher.engine.wire.reducer import ABANDONED, CULPRIT
from launcher.engine.wire.step_counts import FIELDS

SUMS = [[4.0, 9.0, 12.0], [4.0, math.inf, 12.0], [4.0, math.nan, 12.0], [0.0, 0.0, 0.0]]
MARKS = [[0, 0], [CULPRIT, 0], [0, ABANDONED], [ABANDONED, CULPRIT]]
TALLIES = [[64, 32, 0, 1], [64, math.nan, 1, 0], [0, 0, 0, 0], [math.inf, 1, 0, 0]]
STATES = [[16, 0, 1, 3, 0, 0, 0], [0, 1, 1, 9, 2, 1, 1]]
RATES = torch.linspace(0.1, 0.2, 5, dtype=torch.float64)


def cases() -> list[tuple[Tensor, ...]]:
    return [
        (
            torch.tensor(sums, dtype=torch.float64),
            torch.tensor(marks, dtype=torch.float64),
            torch.tensor(tally + [0] * (FIELDS - len(tally)), dtype=torch.float64),
            torch.tensor(state),
            RATES,
        )
        for sums, marks, tally, state in itertools.product(SUMS, MARKS, TALLIES, STATES)
    ]


def test_only_a_finite_gradient_of_finite_losses_of_some_samples_is_applied() -> None:
    terms = Terms(32.0, None, Scaling(growth_interval=2))
    for sums, marks, tally, state, rates in cases():
        verdict = on_device(terms, sums, marks, tally, state, rates)
        abandoned = ABANDONED in marks
        clean = sums.isfinite().all() and tally[1].isfinite() and 0 < tally[0] < math.inf and not abandoned
        assert bool(verdict.skip) != bool(clean)
        assert bool(verdict.abandoned) == abandoned
        if clean:
            unscale = 32.0 / (2.0 ** state[0].item() * 64)
            assert verdict.multiplier.item() == unscale
            assert verdict.packed[1].item() == unscale * sums.sum().sqrt().item()
        if abandoned:
            assert verdict.state.tolist() == with_scale(state.tolist())


def test_the_last_rate_holds_for_ever_after() -> None:
    assert [next_rate(RATES, torch.tensor(step)).item() for step in (0, 4, 5, 99)] == [
        RATES[i].item() for i in (0, 4, 4, 4)
    ]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("mode", ["dynamic", "static", "none"])
def test_the_host_gives_the_same_bits(mode, clip_norm) -> None:
    terms = Terms(32.0, clip_norm, Scaling(mode, growth_interval=2, max=2**17))
    for case in cases():
        before = [tensor.clone() for tensor in case]
        assert_equal(on_device(terms, *case), on_host(terms, *case))
        assert all(
            torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(before, case, strict=True)
        )


NUMBERS = strategies.floats(0, 1e300) | strategies.sampled_from([math.inf, math.nan, 0.0])


@given(
    sums=strategies.lists(NUMBERS, min_size=1, max_size=9),
    marks=strategies.lists(strategies.sampled_from([0, 0, 0, CULPRIT, ABANDONED]), min_size=1, max_size=4),
    tally=strategies.tuples(NUMBERS, strategies.floats(), strategies.integers(0, 3)),
    state=strategies.tuples(
        strategies.integers(0, 24), *[strategies.integers(0, 4)] * 2, *[strategies.integers(0, 9)] * 4
    ),
    scaling=strategies.builds(
        Scaling,
        strategies.sampled_from(["dynamic", "static", "none"]),
        growth_interval=strategies.integers(1, 5),
        hysteresis=strategies.integers(1, 3),
    ),
    unit=strategies.integers(0, 20),
    clip_norm=strategies.none() | strategies.floats(1e-3, 1e3),
)
@example(
    [1.1942099505649086e299, 4.85922096421216e299, 4.85922096421216e299, 4.9316452857140605e299],
    [0.0],
    (1.0, 0.0, 0.0),
    (0,) * 7,
    Scaling("dynamic"),
    0,
    None,
)  # a root that math.sqrt rounds otherwise
@example([0.0], [0.0], (2.3e-309, 0.0, 0.0), (2, *[0] * 6), Scaling("dynamic"), 0, None)  # a huge multiplier
def test_the_host_gives_the_same_bits_for_any_step(
    sums, marks, tally, state, scaling, unit, clip_norm
) -> None:
    counts = torch.tensor([*tally, *[0] * (FIELDS - len(tally))], dtype=torch.float64)
    terms = Terms(2.0**unit, clip_norm, scaling)
    values = [torch.tensor(each, dtype=torch.float64) for each in (sums, marks)]
    case = (*values, counts, torch.tensor(state), RATES)
    assert_equal(on_device(terms, *case), on_host(terms, *case))


@pytest.mark.parametrize("largest", [4.0, math.inf, math.nan])
def test_without_marks_the_only_rank_is_to_blame(largest) -> None:
    sums, _, tally, state, rates = cases()[0]
    sums = torch.cat([sums, torch.tensor([largest], dtype=torch.float64)])
    terms, blame = Terms(32.0, None, Scaling()), CULPRIT * (not math.isfinite(largest))
    marks = torch.tensor([blame], dtype=torch.float64)
    expected = on_device(terms, sums, marks, tally, state, rates)
    assert_equal(expected, on_device(terms, sums, None, tally, state, rates))
    assert_equal(expected, on_host(terms, sums, None, tally, state, rates))


def on_device(terms: Terms, sums, marks, tally: Tensor, state: Tensor, rates: Tensor, judge=judge) -> Verdict:
    """What the device decides, its numbers as the host reads them."""
    rules = Rules.of(terms, len(rates), torch.device("cpu"))
    present = torch.tensor(with_scale(state.tolist()), dtype=torch.float64)
    found = judge(rules, sums, marks, tally, present, rates)
    assert [each.item() for each in found.narrow] == [
        each.to(torch.float32).item() for each in (found.lr, found.number, found.skip)
    ]
    numbers = Numbers.unpacked(found.packed, 1 if marks is None else len(marks), len(sums))
    return found._replace(packed=as_tensor(numbers), narrow=None)


def on_host(terms: Terms, sums, marks, tally: Tensor, state: Tensor, rates: Tensor) -> Verdict:
    """What the host decides, as tensors."""
    found = judge_on_host(terms, sums, marks, tally.tolist(), state.tolist(), rates.tolist())
    assert isinstance(found.packed, Numbers)
    return Verdict(
        torch.tensor(found.multiplier, dtype=torch.float32),
        *(torch.tensor(each, dtype=torch.float64) for each in (found.lr, found.number)),
        *map(torch.tensor, (found.skip, found.abandoned)),
        torch.tensor(with_scale(found.state), dtype=torch.float64),
        as_tensor(found.packed),
        None,
    )


def as_tensor(numbers: Numbers) -> Tensor:
    return torch.cat([torch.tensor(numbers.head, dtype=torch.float64), numbers.marks, numbers.sums])


def assert_equal(verdict: Verdict, same: Verdict) -> None:
    for one, other in zip(verdict[:-1], same[:-1], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.isnan(), other.isnan()), (verdict, same)
        assert torch.equal(one.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0)), (verdict, same)
