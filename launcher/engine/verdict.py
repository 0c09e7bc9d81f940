"""Decides whether a step is applied or skipped, and the update's multiplier, from numbers equal on all ranks.

Owns the arithmetic on a step's scalars, as one pure function in two forms. On a GPU a compiler fuses its 70
operations, each of which is otherwise a kernel launch. On a CPU it computes with Python's numbers. All ranks
call it with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from launcher.engine.precision.loss_scale import Scaling, next_fields, next_state, power_of_two
from launcher.engine.wire.reducer import ABANDONED
from launcher.engine.wire.step_counts import FIELDS


@dataclass(frozen=True)
class Terms:
    """What is the same in every step. `unit` is the wire's divisor times the reference count n0."""

    unit: float
    clip_norm: float | None
    scaling: Scaling


class Verdict(NamedTuple):
    """0-dim tensors on the device, except `state` (the loss scale's next) and `packed` (see `result`)."""

    multiplier: Tensor  # fp32: turns the wire gradient into the clipped mean gradient
    lr: Tensor  # fp64
    number: Tensor  # int64: applied steps, this one included
    skip: Tensor  # bool
    abandoned: Tensor  # bool
    state: Tensor  # int64 [LossScale.FIELDS]
    packed: Tensor  # fp64 [5 + tally + LossScale.FIELDS + ranks + parameters]


def judge(terms: Terms, sums: Tensor, marks: Tensor, tally: Tensor, state: Tensor, rates: Tensor) -> Verdict:
    """`sums` [parameters] of squares and `marks` [ranks] are the reducer's, `tally` is summed over the ranks.

    `state` is the loss scale's before the step, `rates` [steps] has one learning rate per applied step. If a
    rank has abandoned the step, no rank is marked as a culprit, and all counts are 0.
    """
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


NO_OR_YES = torch.tensor([False, True]).unbind()  # not to be written to


def judge_on_host(
    terms: Terms, sums: Tensor, marks: Tensor, tally: Tensor, state: Tensor, rates: Tensor
) -> Verdict:
    """`judge` for tensors on a CPU, in Python's numbers: the same bits without 70 small operations."""
    abandoned = marks.max().item() == ABANDONED  # the largest mark; a list would have thousands of ranks
    if abandoned:
        tally, sums = torch.zeros_like(tally), torch.zeros_like(sums)
        marks = marks * (marks == ABANDONED)
    counts, fields = tally.tolist(), state.tolist()
    count, loss_sum, bad_losses = counts[:3]
    total = sums.sum()
    squares = total.item()
    root = total.sqrt().item()  # math.sqrt's may differ by an ulp

    bad_loss = bad_losses > 0
    finite = squares < math.inf
    overflow = not (finite or bad_loss)
    skip = not (finite and not bad_loss and 0 < count < math.inf)

    scale = math.ldexp(1.0, fields[0])
    unscale = terms.unit * _reciprocal(scale * count)
    grad_norm = unscale * root
    multiplier = unscale
    if terms.clip_norm is not None:
        factor = terms.clip_norm * _reciprocal(grad_norm + 1e-6)
        multiplier *= 1.0 if factor > 1.0 else factor  # not min(): nan stays
    applied = fields[3]
    lr = rates[min(applied, len(rates) - 1)].item()
    after = next_fields(terms.scaling, fields, skip, bad_loss, overflow, abandoned)
    mean = loss_sum / count if count else loss_sum * math.inf
    head = torch.tensor([mean, grad_norm, scale, lr, skip, *counts, *after], dtype=torch.float64)
    return Verdict(
        # full() takes half the time of tensor(), but raises for what float32 cannot hold: this becomes inf.
        torch.full((), multiplier, dtype=torch.float64).float(),
        torch.full((), lr, dtype=torch.float64),
        torch.full((), applied + 1, dtype=torch.int64),
        NO_OR_YES[skip],
        NO_OR_YES[abandoned],
        torch.tensor(after),
        torch.cat([head, marks, sums]),
    )


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


def _reciprocal(value: float) -> float:
    """1 / value, as torch divides a number by a tensor; inf for 0."""
    return 1.0 / value if value else math.copysign(math.inf, value)


def _clip_factor(clip_norm: float, grad_norm: Tensor) -> Tensor:
    """min(1, clip / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_`."""
    return (clip_norm / (grad_norm + 1e-6)).clamp(max=1.0)
