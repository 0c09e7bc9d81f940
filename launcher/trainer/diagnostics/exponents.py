"""Where a step's gradients lie in the range of fp16: exponents counted by parameter.

Owns the counting, on the device and without waiting for it, and what the counts mean. Reads reduced wire
gradients on request, and never changes them.

An element on the wire is S times a sum over samples (S is the loss scale, and includes n0 and the pre-divisor
here). At scale 1 it would be that divided by S, so one table of exponents serves both scales: at scale 2^s
the elements below 2^-25 are zero in fp16, at scale 1 those below 2^(s - 25). Zeros that were rounded to zero
cannot be distinguished from those of a dead unit or an unused parameter: both count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import launcher.engine.async_work as async_work
from launcher.telemetry.events import GradientsEvent, LayerShares
from launcher.trainer.progress import StepIndex

FIRST_EXPONENT, LAST_EXPONENT = -40, 16  # of the bins; others are counted in the outermost
FLUSHED_BELOW = -25  # half of fp16's smallest number, 2^-24; the tie itself counts as kept
NEAR_MAX_FROM = 14  # two octaves: 2^14 = 16384 to fp16's end at 65504
_PIECE = 1 << 24  # elements that are counted at once, which take 40 bytes each
_COLUMNS = 1 + LAST_EXPONENT - FIRST_EXPONENT + 1  # zeros, then one per exponent


def count_exponents(gradients: Mapping[str, Tensor], group: async_work.Group = None) -> ExponentCounts:
    """Count what each gradient (fp16, bf16 or fp32, any shape) holds now. Does not wait for results.

    With a `group`, counts are summed over its ranks, each of which passes its own elements: a collective.
    """
    counts, ready = torch.stack([_row(gradient) for gradient in gradients.values()]), None
    async_work.all_reduce(counts, group)
    host = counts.to("cpu", non_blocking=True)
    if counts.is_cuda:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
    return ExponentCounts(list(gradients), host, ready)


def _row(gradient: Tensor) -> Tensor:
    """int64 [_COLUMNS]: zeros, then the elements of each exponent."""
    row = torch.zeros(_COLUMNS, dtype=torch.int64, device=gradient.device)
    for piece in torch.split(gradient.detach().reshape(-1), _PIECE):
        values = piece.float()
        _, exponents = torch.frexp(values)  # values = mantissa in [0.5, 1) * 2^exponent
        exponents = torch.where(values.isfinite(), exponents - 1, LAST_EXPONENT)
        columns = 1 + exponents.clamp(FIRST_EXPONENT, LAST_EXPONENT) - FIRST_EXPONENT
        columns = torch.where(values == 0, 0, columns)
        # On a GPU bincount would wait for its result's size, and histc is refused by train.deterministic.
        row.index_add_(0, columns.long(), torch.ones_like(columns, dtype=torch.int64))
    return row


@dataclass(frozen=True)
class ExponentCounts:
    """Counts being copied to the host. Reading them a step late does not wait."""

    names: Sequence[str]
    counts: Tensor  # int64 [parameters, _COLUMNS]
    ready: torch.cuda.Event | None

    def read(self, index: StepIndex, scale: float) -> GradientsEvent:
        """The statistics of the step, whose gradients were scaled by this loss scale (a power of two).

        The exponent of v is floor(log2(|v|)), as on the wire. Zeros are in `zeros` alone.
        """
        if self.ready is not None:
            self.ready.synchronize()
        total, rows = self.counts.sum(dim=0).tolist(), self.counts.tolist()
        exponent = round(math.log2(scale))
        return GradientsEvent(
            index.global_step,
            epoch=index.epoch,
            scale=scale,
            **vars(_shares(total, exponent)),
            zeros=total[0],
            first_exponent=FIRST_EXPONENT,
            histogram=total[1:],
            layers={name: _shares(row, exponent) for name, row in zip(self.names, rows, strict=True)},
        )


def _shares(row: list[int], exponent: int) -> LayerShares:
    """All of them 0 for a parameter without elements."""
    elements = max(1, sum(row))
    return LayerShares(
        zero_share=_below(row, FLUSHED_BELOW) / elements,
        zero_share_at_scale_1=_below(row, FLUSHED_BELOW + exponent) / elements,
        near_max_share=sum(row[1 + NEAR_MAX_FROM - FIRST_EXPONENT :]) / elements,
    )


def _below(row: list[int], exponent: int) -> int:
    """Zeros, and elements whose exponent is smaller."""
    return sum(row[: 1 + max(0, exponent - FIRST_EXPONENT)])
