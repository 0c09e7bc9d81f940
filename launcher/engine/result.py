"""A step's report on the host, without making the step wait for the device.

Owns the copy of a step's numbers to the host and their decoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.engine.checks.step_warnings import StepWarnings
from launcher.engine.limits import VOTES
from launcher.engine.precision.found_inf import ABANDONED, StepTotals, Verdict
from launcher.engine.step_timer import Mark, spans_ms


@dataclass(frozen=True)
class StepReport:
    """The numbers of one step, on the host. `loss` is the mean over all samples of all ranks.

    The same on all ranks, except `sent_bytes` and `spans_ms` (milliseconds by part of the step).

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
    skips_at_min_scale: int  # overflows at the smallest scale since the last applied step
    bad_loss_steps: int  # steps since the last applied one with a loss that was not finite
    sent_bytes: int  # by this rank: of gradients, and of weights that are gathered; see ShardedSum.start
    culprit_ranks: tuple[int, ...]  # ranks whose own gradient was not finite
    culprit_parameters: tuple[str, ...]  # parameters whose reduced gradient was not finite
    votes: tuple[float, ...]  # sum over the ranks, by question
    spans_ms: dict[str, float]  # compute, communication (not overlapped), update, parts of the caller
    outlier: bool = False  # skipped for its loss or gradient norm alone: see SkipOutliers
    abandoned_ranks: tuple[int, ...] = ()  # ranks that called abandon(), or step() after a failed backward()


# Of a report's numbers, those of the loss scale's state after the step.
COUNTERS = ("applied_steps", "skipped_steps", "skips_at_min_scale", "bad_loss_steps")


@dataclass(frozen=True)
class StepNumbers:
    """What a step has decided and counted: numbers of the host where it decides, else 0-dim on the device."""

    numbers: Mapping[str, Any]
    votes: Any  # [VOTES], a list or a tensor
    status: Any  # [ranks], likewise
    squares_by_parameter: Tensor
    sent_bytes: int  # as in StepReport

    @classmethod
    def of(cls, totals: StepTotals, verdict: Verdict, scale: Any, lr: Any, sent_bytes: int) -> StepNumbers:
        """`scale` and `lr` are those that the step used."""
        numbers = {
            "loss": verdict.loss,
            "grad_norm": verdict.grad_norm,
            "scale": scale,
            "lr": lr,
            "count": totals.samples,
            "skipped": verdict.skip,
            "bad_losses": totals.bad_losses,
        } | {name: getattr(verdict.state, name) for name in COUNTERS}
        if verdict.outlier is not None:
            numbers["outlier"] = verdict.outlier
        return cls(numbers, totals.votes, totals.status, totals.squares_by_parameter, sent_bytes)

    def packed(self) -> Tensor:
        """One fp64 tensor, so that one copy brings all of them to the host."""
        numbers = torch.stack([number.double() for number in self.numbers.values()])
        return torch.cat([numbers, self.votes, self.status, self.squares_by_parameter])

    def unpacked(self, packed: Tensor) -> StepNumbers:
        """The same on the host, from a copy of `packed()` there."""
        lengths = [len(self.numbers) + VOTES, len(self.status), len(self.squares_by_parameter)]
        few, status, squares = torch.split(packed, lengths)
        numbers = few.tolist()
        named = dict(zip(self.numbers, numbers[:-VOTES], strict=True))
        return StepNumbers(named, numbers[-VOTES:], status.tolist(), squares, self.sent_bytes)

    def report(self, names: Sequence[str], spans_ms: dict[str, float]) -> StepReport:
        """The report, from numbers of the host. `names` of the parameters, in the order of their squares."""
        skipped = bool(self.numbers["skipped"])
        counters = {name: int(self.numbers[name]) for name in ("bad_losses", *COUNTERS)}
        flags = {"skipped": skipped, "outlier": bool(self.numbers.get("outlier"))}
        numbers = {**self.numbers, **counters, **flags}
        votes = tuple(self.votes)
        ranks: list[int] = []
        bad: list[int] = []
        if skipped:  # else no rank has a status, and no square is not finite
            ranks = [rank for rank, status in enumerate(self.status) if status]
            bad = (~self.squares_by_parameter.isfinite()).nonzero().flatten().tolist()
        abandoned = [rank for rank in ranks if self.status[rank] == ABANDONED]
        if len(self.status) == 1:  # a rank alone has no status: what is not finite is its own
            ranks = [0] * bool(bad)
        if abandoned:  # what the other ranks have found and counted is of no step
            numbers |= {"loss": math.nan, "grad_norm": math.nan, "count": 0.0, "bad_losses": 0}
            votes, ranks, bad = (0.0,) * VOTES, [], []
        return StepReport(
            **numbers,
            sent_bytes=self.sent_bytes,
            culprit_ranks=tuple(ranks),
            culprit_parameters=tuple(names[index] for index in bad),
            votes=votes,
            spans_ms=spans_ms,
            abandoned_ranks=tuple(abandoned),
        )


@dataclass(eq=False)
class StepResult:
    """A step's numbers being copied to the host. `read()` one step late does not wait for the device."""

    _numbers: StepNumbers
    _names: list[str]  # of the parameters, in the order of their squares
    _marks: Sequence[Mark]
    _warnings: StepWarnings
    _copy: Tensor | None = None  # None where the numbers are on the host
    _ready: torch.cuda.Event | None = None  # when the copy is there

    def __post_init__(self) -> None:
        if not isinstance(self._numbers.numbers["loss"], Tensor):
            return
        self._copy = packed = self._numbers.packed()
        # A meta tensor has nothing to copy: a step on meta is only traced for host reads.
        if not packed.is_meta:
            self._copy = packed.to("cpu", non_blocking=True)
        if packed.is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def read(self) -> StepReport:
        """The numbers. Waits until the step is done on the device, so read one step late.

        Warns once per Stepper about parameters that had no gradient in the first applied step that is read.
        """
        if self._ready is not None:
            self._ready.synchronize()
        found = self._numbers if self._copy is None else self._numbers.unpacked(self._copy)
        report = found.report(self._names, spans_ms(self._marks))
        if not report.skipped:
            self._warnings.gradients(self._names, found.squares_by_parameter)
        return report
