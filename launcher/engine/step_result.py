"""A step's report on the host, without making the step wait for the device.

Owns the copy of a step's numbers to the host and their decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.engine.limits import VOTES
from launcher.engine.notices import NO_SAMPLES, Notices
from launcher.engine.step_timer import Mark, spans_ms
from launcher.engine.verdict import Numbers
from launcher.engine.wire.reducer import ABANDONED


@dataclass(frozen=True)
class StepReport:
    """The numbers of one step, on the host. `loss` is the mean over all samples of all ranks.

    The same on all ranks, except `wire_bytes` and `spans_ms` (milliseconds by part of the step).

    A step that some rank has abandoned has no samples: `loss` and `grad_norm` are NaN, `votes` are 0.
    """

    loss: float
    grad_norm: float  # of the mean gradient, before clipping
    scale: float  # the loss scale that this step used
    lr: float
    count: float  # samples (or tokens) of the step, over all ranks and micro-batches
    skipped: bool
    bad_losses: int  # micro-batches whose loss was not finite, over all ranks
    applied_steps: int  # after this step
    skipped_steps: int  # after this step
    floor_skips: int  # overflows in a row at the smallest scale
    bad_loss_steps: int  # steps in a row with a loss that was not finite
    wire_bytes: int  # of gradients, passed to collectives by this rank
    culprit_ranks: tuple[int, ...]  # ranks whose own gradient was not finite
    culprit_parameters: tuple[str, ...]  # parameters whose reduced gradient was not finite
    votes: tuple[int, ...]  # sum over the ranks, by question
    spans_ms: dict[str, float]  # compute, wire (not overlapped), update, and parts marked by the caller
    abandoned_ranks: tuple[int, ...] = ()  # ranks that called abandon(), or step() after a failed backward()


def to_host(packed: Tensor | Numbers) -> tuple[Tensor | Numbers, torch.cuda.Event | None]:
    """Start copying a step's numbers, and when they are there; None if they are at once.

    `packed`: Numbers, or all of them in one tensor on the device, fp64.
    """
    # A meta tensor has nothing to copy: a step on meta is only traced for host reads.
    if isinstance(packed, Numbers) or packed.is_meta:
        return packed, None
    host, ready = packed.to("cpu", non_blocking=True), None
    if packed.is_cuda:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
    return host, ready


@dataclass(eq=False)
class StepResult:
    """A step's numbers being copied to the host. `read()` one step late does not wait for the device."""

    _packed: Tensor | Numbers
    _ready: torch.cuda.Event | None
    _names: list[str]
    _num_ranks: int
    _wire_bytes: int
    _marks: Sequence[Mark]
    _notices: Notices

    def read(self) -> StepReport:
        """The numbers. Waits until the step is done on the device, so read one step late.

        Warns once per Stepper about a step without samples, which is skipped and has a loss of nan, and about
        parameters whose gradient was zero in the first applied steps that were read.
        """
        if self._ready is not None:
            self._ready.synchronize()
        numbers = self._packed
        if not isinstance(numbers, Numbers):
            numbers = Numbers.unpacked(numbers, self._num_ranks, len(self._names))
        head, marks, sums = numbers
        loss, grad_norm, scale, lr, skipped, count, _, bad_losses, *more = head
        votes = tuple(map(int, more[:VOTES]))
        _, _, _, applied, skips, floor_skips, bad_loss_steps = map(int, more[VOTES:])
        culprits: list[int] = []
        abandoned: list[int] = []
        parameters: list[str] = []
        if skipped:  # else there are none
            for rank in marks.nonzero().flatten().tolist():
                (abandoned if marks[rank] == ABANDONED else culprits).append(rank)
            parameters = [self._names[index] for index in (~sums.isfinite()).nonzero().flatten().tolist()]
        else:
            self._notices.gradients(self._names, sums, stacklevel=2)
        if count == 0 and not abandoned:
            self._notices.warn(NO_SAMPLES, stacklevel=2)
        return StepReport(
            loss=loss,
            grad_norm=grad_norm,
            scale=scale,
            lr=lr,
            count=count,
            skipped=bool(skipped),
            bad_losses=int(bad_losses),
            applied_steps=applied,
            skipped_steps=skips,
            floor_skips=floor_skips,
            bad_loss_steps=bad_loss_steps,
            wire_bytes=self._wire_bytes,
            culprit_ranks=tuple(culprits),
            culprit_parameters=tuple(parameters),
            votes=votes,
            spans_ms=spans_ms(self._marks),
            abandoned_ranks=tuple(abandoned),
        )
