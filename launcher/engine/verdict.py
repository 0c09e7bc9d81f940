"""Decides whether a step is applied or skipped, and the update's multiplier, from numbers equal on all ranks.

Owns the arithmetic on a step's scalars, in two forms with the same results: on a CPU in Python's numbers, on
a device in a few operations on vectors, each of which is a kernel launch where no compiler joins them. The
second form alone would take 1.56 times the CPU time of a tiny network's step in fp32, and 1.38 times that in
native fp16. All ranks call it with the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from launcher.engine.precision.loss_scale import APPLIED, LossScale, Scaling, Transitions, next_fields
from launcher.engine.wire.reducer import ABANDONED, CULPRIT
from launcher.engine.wire.step_counts import FIELDS

COUNTERS = len(LossScale.FIELDS)
SEEN = COUNTERS + 1 + FIELDS + 2  # numbers that the questions of a step are about


class Terms(NamedTuple):
    """What is the same in every step. `unit` is the wire's divisor times the reference count n0."""

    unit: float
    clip_norm: float | None
    scaling: Scaling


class Numbers(NamedTuple):
    """A step's numbers on the host."""

    head: list[float]  # loss, norm, scale, rate, whether skipped, the tally, the loss scale's state
    marks: Tensor  # [ranks] fp64
    sums: Tensor  # [parameters] fp64

    @classmethod
    def unpacked(cls, packed: Tensor, num_ranks: int, num_parameters: int) -> Numbers:
        """Read on the host what `judge` has packed."""
        few, marks, sums = torch.split(
            packed, [len(packed) - num_ranks - num_parameters, num_ranks, num_parameters]
        )
        _, lr, skipped, *numbers = few.tolist()
        after, (unscale, scale, *_) = numbers[:COUNTERS], numbers[COUNTERS:]
        *tally, squares, worst = numbers[-FIELDS - 2 :]
        after[0] = math.frexp(after[0])[1] - 1  # of 2^s, s
        return cls.of((scale, unscale, lr, skipped), squares, tally, after, (marks, worst), sums)

    @classmethod
    def of(
        cls,
        factors: tuple[float, float, float, float],
        squares: float,
        tally: Sequence[float],
        after: Sequence[float],
        marks: tuple[Tensor, float],
        sums: Tensor,
    ) -> Numbers:
        """`factors`: scale, the multiplier without clipping, rate, skip flag; `marks` with the largest."""
        scale, unscale, lr, skipped = factors
        found, worst = marks
        if worst == ABANDONED:  # no rank is then marked as a culprit, and all counts are 0
            tally, squares = [0.0] * FIELDS, math.nan
            found, sums = found * (found == ABANDONED), torch.zeros_like(sums)
        elif len(found) == 1 and not squares < math.inf:
            found = torch.full_like(found, CULPRIT)  # one rank alone sends no mark
        count, loss_sum, *_ = tally
        # Without samples 0 * inf: nan, as 0 / 0 is in torch, where Python would raise.
        mean = loss_sum / count if count else loss_sum * math.inf
        norm = unscale * math.sqrt(squares)
        return cls([mean, norm, scale, lr, skipped, *tally, *after], found, sums)


class Verdict(NamedTuple):
    """0-dim tensors on the device, except `state` and `packed`; on the host Python's numbers."""

    multiplier: Tensor | float  # fp32: turns the wire gradient into the clipped mean gradient
    lr: Tensor | float  # fp64
    number: Tensor | float  # applied steps, this one included; fp64 on the device
    skip: Tensor | bool
    abandoned: Tensor | bool
    state: Tensor | list[int]  # the loss scale's next
    packed: Tensor | Numbers  # fp64, for Numbers.unpacked
    narrow: tuple[Tensor, Tensor, Tensor] | None  # rate, number, skip flag in fp32, for a fused kernel


@dataclass(frozen=True)
class Rules:
    """The constants of `judge` on the device: `Transitions`, and the questions about a step.

    The answers are the bits of an index into `rows`; `clip_norm` None: not clipped.
    """

    clip_norm: float | None
    unit: Tensor  # 0-dim
    low: Tensor  # [SEEN]
    high: Tensor
    bits: Tensor  # [SEEN] int64: those of a number outside of its bounds
    rows: Tensor  # [2 ** questions, factors + terms + 1]
    no_mark: Tensor  # [1]

    @classmethod
    def of(cls, terms: Terms, num_rates: int, device: torch.device) -> Rules:
        own, ever = Transitions.of(terms.scaling), (-math.inf, math.inf)
        state = list(own.bounds)
        state[APPLIED] = (-math.inf, num_rates - 1.0)  # no question: an index into the rates
        asked = {0: 128, 1: 64, 2: 32, COUNTERS: 16}  # by position, in the order of Transitions
        count, bad_losses, squares, worst = (COUNTERS + 1 + n for n in (0, 2, FIELDS, FIELDS + 1))
        asked |= {count: 8, bad_losses: 4, squares: 2, worst: 1}
        bounds = [*state, (-math.inf, own.highest), *[ever] * (FIELDS + 2)]
        bounds[count] = (math.ulp(0.0), sys.float_info.max)  # a count on a device has not been validated
        bounds[bad_losses] = (-math.inf, 0.0)
        bounds[squares] = (-math.inf, sys.float_info.max)  # a sum of squares: else it is inf or nan
        bounds[worst] = (-math.inf, float(CULPRIT))
        bits = [asked.get(position, 0) for position in range(SEEN)]

        def on_device(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        low, high = on_device(bounds).unbind(1)
        unit, rows, no_mark = map(on_device, (terms.unit, own.rows, [0.0]))
        low, high = low.contiguous(), high.contiguous()
        return cls(terms.clip_norm, unit, low, high, torch.tensor(bits, device=device), rows, no_mark)


def judge(
    rules: Rules, sums: Tensor, marks: Tensor | None, tally: Tensor, state: Tensor, rates: Tensor
) -> Verdict:
    """`sums` [parameters] of squares and `marks` [ranks] are the reducer's, `tally` is summed over the ranks.

    `state` is the loss scale's before the step, `rates` [steps] has one learning rate per applied step.
    `marks` None: of one rank, which has not abandoned the step. All fp64.
    """
    worst = rules.no_mark if marks is None else marks.max().view(1)
    seen = torch.cat([state, state[:1], tally, sums.sum().view(1), worst])
    within = seen.clamp(rules.low, rules.high)
    outside = within != seen  # also where it is nan
    row = rules.rows.index_select(0, (outside * rules.bits).sum().view(1)).view(-1)
    factors, terms, skipped = torch.split(row, [COUNTERS, COUNTERS, 1])
    after = torch.addcmul(terms, state, factors)  # exact: small integers, and powers of two

    unscale = rules.unit / (state[0] * tally[0])
    multiplier = unscale
    if rules.clip_norm is not None:
        norm = unscale * seen[-2].sqrt()
        # min(1, clip / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_`.
        multiplier = unscale * (rules.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    # Clamped to the end of the table: its last rate holds from then on.
    lr = rates if len(rates) == 1 else rates.index_select(0, within[APPLIED : APPLIED + 1].long())
    marks = rules.no_mark if marks is None else marks
    packed = torch.cat([multiplier.view(1), lr, skipped, after, unscale.view(1), seen, marks, sums])
    narrow = packed[: 4 + APPLIED].float()
    skip, abandoned = narrow[2] > 0, outside[-1]
    narrowed = (narrow[1], narrow[3 + APPLIED], narrow[2])
    # A rate of its own, and not a part of `packed`: a compiled kernel copies what is not aligned.
    return Verdict(narrow[0], lr.view(()), after[APPLIED], skip, abandoned, after, packed, narrowed)


NO_MARK = torch.zeros(1, dtype=torch.float64)  # not to be written to


def judge_on_host(
    terms: Terms, sums: Tensor, marks: Tensor | None, tally: list[float], state: list[int], rates: list[float]
) -> Verdict:
    """`judge` in Python's numbers, from tensors on a CPU: the same bits without 15 small operations."""
    # The largest mark: a list would have thousands of ranks.
    worst = 0.0 if marks is None else marks.max().item()
    abandoned = worst == ABANDONED
    count, _, bad_losses = tally[:3]
    total = sums.sum()
    squares = total.item()

    bad_loss = bad_losses > 0
    # False for nan, too.
    finite = squares < math.inf
    overflow = not (finite or bad_loss)
    # A count that is nan compares false, and so skips.
    skip = abandoned or not (finite and not bad_loss and 0 < count < math.inf)

    scale = math.ldexp(1.0, state[0])
    unscale = _over(terms.unit, scale * count)
    multiplier = unscale
    if terms.clip_norm is not None:
        norm = unscale * total.sqrt().item()  # math.sqrt's may differ by an ulp
        # torch computes number / tensor as the reciprocal times the number: dividing here would give other
        # bits.
        factor = terms.clip_norm * _over(1.0, norm + 1e-6)
        multiplier *= 1.0 if factor > 1.0 else factor  # not min(): nan stays
    lr = rates[min(state[APPLIED], len(rates) - 1)]
    after = next_fields(terms.scaling, state, skip, bad_loss, overflow, abandoned)
    found = (NO_MARK if marks is None else marks, worst)
    packed = Numbers.of((scale, unscale, lr, skip), squares, tally, after, found, sums)
    # As a tensor's conversion to fp32: what it cannot hold becomes inf.
    multiplier = ctypes.c_float(multiplier).value
    return Verdict(multiplier, lr, after[APPLIED], skip, abandoned, after, packed, None)


def judge_on(on_host: bool, device: torch.device) -> Callable[..., Verdict]:
    """The form of `judge` for the host or for a device, with Terms in place of Rules."""
    if on_host:
        return judge_on_host
    rules_of = functools.cache(Rules.of)

    def judge_on_device(
        terms: Terms, sums: Tensor, marks: Tensor | None, tally: Tensor, state: Tensor, rates: Tensor
    ) -> Verdict:
        # The unit is known from the first step on, and changes only if that is abandoned.
        return judge(rules_of(terms, len(rates), device), sums, marks, tally, state, rates)

    return judge_on_device


def next_rate(rates: Tensor, applied: Tensor) -> Tensor:
    """The learning rate of the next applied step, 0-dim; after the end of the table its last one."""
    # A 1-dim index: with a 0-dim one `rates[...]` reads its value on the host.
    return rates.index_select(0, applied.clamp(max=len(rates) - 1).long().view(1)).view(())


def _over(number: float, value: float) -> float:
    """number / value, as torch divides: inf for 0."""
    return number / value if value else math.copysign(math.inf, value)
