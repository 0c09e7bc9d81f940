"""Decides whether a step is applied or skipped, and the update's multiplier, from numbers equal on all ranks.

Owns the arithmetic on a step's scalars, as one pure function in two forms. On a GPU a compiler fuses its 70
operations, each of which is otherwise a kernel launch. On a CPU it computes with Python's numbers. All ranks
call it with the same bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from launcher.engine.precision.loss_scale import (
    APPLIED,
    LossScale,
    Scaling,
    next_fields,
    next_state,
    power_of_two,
)
from launcher.engine.wire.reducer import ABANDONED, CULPRIT, not_finite
from launcher.engine.wire.step_counts import FIELDS

_FP32 = struct.Struct("f")


@dataclass(frozen=True)
class Terms:
    """What is the same in every step. `unit` is the wire's divisor times the reference count n0."""

    unit: float
    clip_norm: float | None
    scaling: Scaling


class Numbers(NamedTuple):
    """A step's numbers on the host."""

    head: list[float]  # 5 values, the tally, the loss scale's state
    marks: Tensor  # [ranks] fp64
    sums: Tensor  # [parameters] fp64

    @classmethod
    def unpacked(cls, packed: Tensor, num_ranks: int, num_parameters: int) -> Numbers:
        """From the same in one tensor: fp64, on the host."""
        head = 5 + FIELDS + len(LossScale.FIELDS)
        numbers, marks, sums = torch.split(packed, [head, num_ranks, num_parameters])
        return cls(numbers.tolist(), marks, sums)


class Verdict(NamedTuple):
    """0-dim tensors on the device, except `state` and `packed`; on the host Python's numbers."""

    multiplier: Tensor | float  # fp32: turns the wire gradient into the clipped mean gradient
    lr: Tensor | float  # fp64
    number: Tensor | int  # int64: applied steps, this one included
    skip: Tensor | bool
    abandoned: Tensor | bool
    state: Tensor | list[int]  # the loss scale's next, int64 [LossScale.FIELDS]
    packed: Tensor | Numbers  # fp64 [5 + tally + LossScale.FIELDS + ranks + parameters]


def judge(
    terms: Terms, sums: Tensor, marks: Tensor | None, tally: Tensor, state: Tensor, rates: Tensor
) -> Verdict:
    """`sums` [parameters] of squares and `marks` [ranks] are the reducer's, `tally` is summed over the ranks.

    `state` is the loss scale's before the step, `rates` [steps] has one learning rate per applied step. If a
    rank has abandoned the step, no rank is marked as a culprit, and all counts are 0. `marks` None: of one
    rank, which has not abandoned it.
    """
    if marks is None:
        marks = not_finite(sums).double().view(1)
    given_up = marks == ABANDONED
    abandoned = given_up.any()
    marks = torch.where(abandoned, marks * given_up, marks)
    totals = torch.cat([tally, sums]).masked_fill(abandoned, 0.0)
    count, loss_sum, bad_losses = totals[:3].unbind()
    squares = totals[FIELDS:].sum()

    bad_loss = bad_losses > 0
    finite = squares < math.inf  # a sum of squares: else it is inf or nan
    overflow = ~(finite | bad_loss)
    # An abandoned step has a count of 0. A count on a device has not been validated.
    skip = ~(finite & ~bad_loss & (count > 0) & (count < math.inf))

    scale = power_of_two(state[0], torch.float64)
    unscale = terms.unit / (scale * count)
    grad_norm = unscale * squares.sqrt()
    multiplier = unscale if terms.clip_norm is None else unscale * _clip_factor(terms.clip_norm, grad_norm)
    applied = state[3]
    lr = next_rate(rates, applied)
    after = next_state(terms.scaling, state, skip, bad_loss, overflow, abandoned)
    values = torch.stack([loss_sum / count, grad_norm, scale, lr, skip.double()])
    packed = torch.cat([values, totals[:FIELDS], after.double(), marks, totals[FIELDS:]])
    return Verdict(multiplier.float(), lr, applied + 1, skip, abandoned, after, packed)


NO_MARK = torch.zeros(1, dtype=torch.float64)  # not to be written to


def judge_on_host(
    terms: Terms,
    sums: Tensor,
    marks: Tensor | None,
    tally: Sequence[float],
    state: list[int],
    rates: Sequence[float],
) -> Verdict:
    """`judge` in Python's numbers, from tensors on a CPU: the same bits without 70 small operations."""
    # The largest mark: a list would have thousands of ranks.
    abandoned = marks is not None and marks.max().item() == ABANDONED
    if abandoned and marks is not None:
        tally, sums = [0.0] * FIELDS, torch.zeros_like(sums)
        marks = marks * (marks == ABANDONED)
    count, loss_sum, bad_losses = tally[:3]
    total = sums.sum()
    squares = total.item()
    root = total.sqrt().item()  # math.sqrt's may differ by an ulp

    bad_loss = bad_losses > 0
    finite = squares < math.inf
    overflow = not (finite or bad_loss)
    skip = not (finite and not bad_loss and 0 < count < math.inf)

    scale = math.ldexp(1.0, state[0])
    unscale = terms.unit * _reciprocal(scale * count)
    grad_norm = unscale * root
    multiplier = unscale
    if terms.clip_norm is not None:
        factor = terms.clip_norm * _reciprocal(grad_norm + 1e-6)
        multiplier *= 1.0 if factor > 1.0 else factor  # not min(): nan stays
    applied = state[APPLIED]
    lr = rates[min(applied, len(rates) - 1)]
    after = next_fields(terms.scaling, state, skip, bad_loss, overflow, abandoned)
    mean = loss_sum / count if count else loss_sum * math.inf
    head = [mean, grad_norm, scale, lr, skip, *tally, *after]
    if marks is None:
        marks = NO_MARK if finite else torch.full_like(NO_MARK, CULPRIT)
    packed = Numbers(head, marks, sums)
    return Verdict(_in_fp32(multiplier), lr, applied + 1, skip, abandoned, after, packed)


def judge_on(on_host: bool, compiled: bool) -> Callable[..., Verdict]:
    """The form of `judge` for the host or for a device, there compiled, if that is wanted."""
    if on_host:
        return judge_on_host
    return torch.compile(judge) if compiled else judge


def next_rate(rates: Tensor, applied: Tensor) -> Tensor:
    """The learning rate of the next applied step, 0-dim; after the end of the table its last one."""
    # A 1-dim index: with a 0-dim one `rates[...]` reads its value on the host, and torch.compile cannot lower
    # `rates.take(...)`.
    return rates.index_select(0, applied.clamp(max=len(rates) - 1).view(1)).view(())


def _in_fp32(value: float) -> float:
    """Rounded to fp32, as a tensor's conversion does: what it cannot hold becomes inf."""
    try:
        return float(_FP32.unpack(_FP32.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _reciprocal(value: float) -> float:
    """1 / value, as torch divides a number by a tensor; inf for 0."""
    return 1.0 / value if value else math.copysign(math.inf, value)


def _clip_factor(clip_norm: float, grad_norm: Tensor) -> Tensor:
    """min(1, clip / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_`."""
    return (clip_norm / (grad_norm + 1e-6)).clamp(max=1.0)
