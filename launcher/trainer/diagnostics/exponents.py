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
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import launcher.engine.async_work as async_work

FIRST_EXPONENT, LAST_EXPONENT = -40, 16  # of the bins; others are counted in the outermost
FLUSHED_BELOW = -25  # half of fp16's smallest number, 2^-24; the tie itself counts as kept
NEAR_MAX_FROM = 14  # two octaves: 2^14 = 16384 to fp16's end at 65504
_PIECE = 1 << 24  # elements that are counted at once, which take 40 bytes each
_COLUMNS = 1 + LAST_EXPONENT - FIRST_EXPONENT + 1  # zeros, then one per exponent


@dataclass(frozen=True)
class LayerStatistics:
    """Shares of one parameter's gradient elements; all of them 0 for a parameter without elements."""

    zero_share: float  # zero in fp16 at this scale
    zero_share_at_scale_1: float  # would be zero in fp16 without a loss scale
    near_max_share: float  # within two octaves of 65504


@dataclass(frozen=True)
class GradientStatistics:
    """One step's gradients. `histogram[k]` counts elements of exponent FIRST_EXPONENT + k, as on the wire.

    The exponent of v is floor(log2(|v|)). Zeros are in `zeros` alone.
    """

    scale: float
    layers: dict[str, LayerStatistics]
    total: LayerStatistics
    zeros: int
    histogram: tuple[int, ...]


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


class ExponentCounts:
    """Counts being copied to the host. Reading them a step late does not wait."""

    def __init__(self, names: list[str], counts: Tensor, ready: torch.cuda.Event | None) -> None:
        self._names = names
        self._counts = counts  # int64 [parameters, _COLUMNS]
        self._ready = ready

    def read(self, scale: float) -> GradientStatistics:
        """The statistics, for gradients scaled by this loss scale (a power of two)."""
        if self._ready is not None:
            self._ready.synchronize()
        total, rows = self._counts.sum(dim=0).tolist(), self._counts.tolist()
        exponent = round(math.log2(scale))
        layers = {name: _shares(row, exponent) for name, row in zip(self._names, rows, strict=True)}
        return GradientStatistics(scale, layers, _shares(total, exponent), total[0], tuple(total[1:]))


def _shares(row: list[int], exponent: int) -> LayerStatistics:
    elements = max(1, sum(row))
    return LayerStatistics(
        zero_share=_below(row, FLUSHED_BELOW) / elements,
        zero_share_at_scale_1=_below(row, FLUSHED_BELOW + exponent) / elements,
        near_max_share=sum(row[1 + NEAR_MAX_FROM - FIRST_EXPONENT :]) / elements,
    )


def _below(row: list[int], exponent: int) -> int:
    """Zeros, and elements whose exponent is smaller."""
    return sum(row[: 1 + max(0, exponent - FIRST_EXPONENT)])
