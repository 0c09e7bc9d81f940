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
_PATTERNS = 1 << 15  # the upper 16 bits of a float without its sign
_ZERO_PLACES = 1 << 12  # addresses that zeros are counted at on a GPU
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


class ExponentCounter:
    """Counts the exponents of gradients. Holds the tables that it needs on the device.

    With a `group`, counts are summed over its ranks, each of which passes its own elements: a collective.
    """

    def __init__(self, device: torch.device, group: async_work.Group = None) -> None:
        self._group = group
        self._columns = {
            dtype: _columns(dtype).to(device) for dtype in (torch.float16, torch.bfloat16, torch.float32)
        }

    def count(self, gradients: Mapping[str, Tensor]) -> ExponentCounts:
        """Count what each gradient (fp16, bf16 or fp32, any shape) holds now. Does not wait for results."""
        rows = [self._row(gradient) for gradient in gradients.values()]
        counts, ready = torch.stack(rows), None
        async_work.all_reduce(counts, self._group)
        host = counts.to("cpu", non_blocking=True)
        if counts.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return ExponentCounts(list(gradients), host, ready)

    def _row(self, gradient: Tensor) -> Tensor:
        """int64 [_COLUMNS]: from bit patterns, because one pass over 16 bits beats a logarithm."""
        patterns = _patterns(gradient.detach().reshape(-1))
        on_cpu = patterns.device.type == "cpu"  # elsewhere bincount would wait for its result's size
        seen = torch.bincount(patterns, minlength=_PATTERNS) if on_cpu else count_by_adding(patterns)
        row = torch.zeros(_COLUMNS, dtype=torch.int64, device=patterns.device)
        return row.index_add_(0, self._columns[gradient.dtype], seen)


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


def count_by_adding(patterns: Tensor) -> Tensor:
    """`bincount` of the patterns, int64 [_PATTERNS], that does not wait for a GPU.

    A GPU serialises additions to one address, and zeros are the most frequent by far: they are spread over
    many addresses after the patterns, by position.
    """
    places = spread_zeros(patterns)
    ones = torch.ones(1, dtype=torch.int64, device=patterns.device).expand(len(patterns))
    seen = torch.zeros(_PATTERNS + _ZERO_PLACES, dtype=torch.int64, device=patterns.device)
    seen.index_add_(0, places, ones)
    seen[0] = seen[_PATTERNS:].sum()
    return seen[:_PATTERNS]


def spread_zeros(patterns: Tensor) -> Tensor:
    """int32 [n]: the patterns, but in place of zeros numbers from _PATTERNS on, each about as often."""
    positions = torch.arange(len(patterns), dtype=torch.int32, device=patterns.device)
    return torch.where(patterns == 0, positions % _ZERO_PLACES + _PATTERNS, patterns)


def _patterns(flat: Tensor) -> Tensor:
    """int16 [n], without the sign: all bits of a half, the upper half of an fp32 (sign, exponent, 7 bits)."""
    if flat.dtype == torch.float32:
        flat = (flat.view(torch.int32) >> 16).to(torch.int16)
    return flat.view(torch.int16) & (_PATTERNS - 1)


def _columns(dtype: torch.dtype) -> Tensor:
    """int64 [_PATTERNS]: the column that each bit pattern is counted in."""
    kind = torch.float16 if dtype == torch.float16 else torch.bfloat16
    values = torch.arange(_PATTERNS, dtype=torch.int16).view(kind).double()
    _, exponents = torch.frexp(values)  # values = mantissa in [0.5, 1) * 2^exponent
    exponents = torch.where(values.isfinite(), exponents - 1, LAST_EXPONENT)
    columns = 1 + exponents.long().clamp(FIRST_EXPONENT, LAST_EXPONENT) - FIRST_EXPONENT
    return torch.where(values == 0, 0, columns)
