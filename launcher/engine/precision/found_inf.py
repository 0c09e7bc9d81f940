"""Did the step overflow, and what follows: one rule for a host that decides and for a device that does.

Owns the arithmetic on a step's totals: whether the step is skipped, the multiplier of its gradient, the next
state of the loss scale. All ranks call `judge` with the same bits, so they decide alike. A CPU decides in
Python's numbers. Elsewhere the host waits for nothing: the same lines run on 0-dim fp64 tensors of the device
(some 50 small kernels).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.engine.precision.loss_scale import ScaleState, Scaling

Number = Any  # of the host, or 0-dim fp64 on the device
# The status of a rank in a step, if not 0: its own gradient was not finite; it drops the step.
NOT_FINITE, ABANDONED = 1, 2


class StepTotals(NamedTuple):
    """What the ranks have added up in a step: the same bits on all of them."""

    samples: Number
    loss_sum: Number
    bad_losses: Number  # micro-batches whose loss was not finite
    squares: Number  # of the reduced gradient: not finite if an element is not; `grad_norm` has the exception
    worst_status: Number
    votes: Any  # [VOTES], a list or a tensor
    status: Any  # [ranks], likewise
    squares_by_parameter: Tensor  # [parameters] fp64, in the order of ParamRange.index


class Operations(NamedTuple):
    """What `judge` cannot write with operators that numbers and tensors share."""

    where: Callable[[Number, Number, Number], Number]
    clamp: Callable[[Number, float, float], Number]
    sqrt: Callable[[Number], Number]
    divide: Callable[[Number, Number], Number]
    to_fp32: Callable[[Number], Number]


ON_HOST = Operations(
    where=lambda condition, one, other: one if condition else other,
    clamp=lambda value, low, high: min(max(value, low), high),
    sqrt=math.sqrt,
    divide=lambda one, other: one / other if other else math.nan,  # Python raises for 0
    to_fp32=lambda value: ctypes.c_float(value).value,  # what fp32 cannot hold becomes inf
)
ON_DEVICE = Operations(torch.where, torch.clamp, torch.sqrt, torch.true_divide, lambda value: value.float())


class Verdict(NamedTuple):
    """What all ranks do with a step, and two numbers for its report."""

    skip: Number
    not_abandoned: Number  # no rank has abandoned it
    multiplier: Number  # fp32: turns the reduced gradient into the clipped mean gradient
    state: ScaleState  # of the loss scale, after the step
    loss: Number  # mean over the samples; nan without any
    grad_norm: Number  # of the mean gradient, before clipping
    outlier: Number | None  # it is skipped for that alone; None where no step is


def judge(
    ops: Operations,
    totals: StepTotals,
    state: ScaleState,
    scaling: Scaling,
    p_n0: float,
    clip_norm: float | None,
    is_outlier: Callable[[Number, Number], Number] | None = None,
) -> Verdict:
    """`p_n0`: the pre-divisor times the reference count: p * n0. `is_outlier` of a loss and a gradient norm.

    `x == 0` stands for `not x`, and `&` for `and`: both read Python's numbers and tensors alike.
    """
    not_abandoned = totals.worst_status < ABANDONED
    clean_losses = totals.bad_losses == 0
    finite = totals.squares < math.inf  # False for nan, too
    # False for a count that is nan. On a device it has not been validated.
    has_samples = (totals.samples > 0) & (totals.samples < math.inf)
    sound = clean_losses & not_abandoned
    applied = finite & sound & has_samples
    # Only this lowers the scale: a non-finite loss, before scaling, cannot be the scale's fault.
    overflow = (finite == 0) & sound

    loss = ops.divide(totals.loss_sum, totals.samples)
    unscale = ops.divide(p_n0, state.scale * totals.samples)
    grad_norm = unscale * ops.sqrt(totals.squares)
    multiplier = unscale
    if clip_norm is not None:
        # As torch.nn.utils.clip_grad_norm_.
        multiplier = unscale * ops.clamp(ops.divide(clip_norm, grad_norm + 1e-6), 0.0, 1.0)
    outlier = None
    if is_outlier is not None:
        outlier = applied & is_outlier(loss, grad_norm)
        applied = applied & (outlier == 0)
    skip = applied == 0
    return Verdict(
        skip=skip,
        not_abandoned=not_abandoned,
        multiplier=ops.to_fp32(multiplier),
        state=next_state(
            ops, state, scaling, skip, overflow, (clean_losses == 0) & not_abandoned, skip & not_abandoned
        ),
        loss=loss,
        grad_norm=grad_norm,
        outlier=outlier,
    )


def next_state(
    ops: Operations,
    state: ScaleState,
    scaling: Scaling,
    skip: Number,
    overflow: Number,
    bad_loss: Number,
    counted: Number,
) -> ScaleState:
    """The loss scale's state after a step. `counted`: skipped and not abandoned, which changes nothing."""
    applied, at_min = skip == 0, overflow
    scale, growth, hysteresis = state.scale, state.growth_tracker, state.hysteresis_tracker
    if scaling.mode == "dynamic":
        at_min = overflow & (scale <= scaling.min)
        grow = applied & (growth >= scaling.growth_interval - 1)
        backoff = overflow & (hysteresis <= 1)
        scale = ops.where(backoff, scale / 2, ops.where(grow, scale * 2, scale))
        scale = ops.clamp(scale, float(scaling.min), float(scaling.max))
        growth = (growth + applied) * ((grow | overflow) == 0)
        # Refilled by each applied step; below 0 where overflows follow each other.
        hysteresis = ops.where(applied, float(scaling.hysteresis), hysteresis - 1.0 * overflow)
    return ScaleState(
        scale=scale,
        growth_tracker=growth,
        hysteresis_tracker=hysteresis,
        applied_steps=state.applied_steps + applied,
        skipped_steps=state.skipped_steps + counted,
        skips_at_min_scale=(state.skips_at_min_scale + at_min) * skip,  # 0 after an applied step
        bad_loss_steps=(state.bad_loss_steps + bad_loss) * skip,
    )
