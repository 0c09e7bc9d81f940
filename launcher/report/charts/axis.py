"""Axes of a plot: range, ticks and their texts, on a linear scale or in powers of 2 or 10.

Pure: numbers in, numbers and strings out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from launcher.report.curve import FloatArray

LOGARITHMIC_FROM = 20.0  # largest over smallest value, which would lie in the lowest 5 % of a linear axis
PADDING = 0.05  # of the range, above and below
LARGEST = 1e300  # of both ends, so that the span between them is finite
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """A range of values; `base` is 1 for a linear scale, else 2 or 10."""

    low: float
    high: float
    base: int = 1

    def places(self, values: FloatArray) -> FloatArray:
        """The places of the values, from 0 at `low` to 1 at `high`."""
        if self.base == 1:
            return (values - self.low) / (self.high - self.low)
        values = np.log(np.maximum(values, self.low))
        return (values - math.log(self.low)) / math.log(self.high / self.low)

    def place(self, value: float) -> float:
        return float(self.places(np.array([value]))[0])

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Round values in the range, with their texts."""
        values = list(self._linear(about) if self.base == 1 else self._powers(about))
        step = min((b - a for a, b in pairwise(values)), default=0.0) if self.base == 1 else 0.0
        power_of_two = self.base == 2 and all(math.log2(value).is_integer() for value in values)
        return [(v, f"2^{round(math.log2(v))}" if power_of_two else short(v, step)) for v in values]

    def _linear(self, about: int) -> Iterable[float]:
        raw = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return (round(k * step, 12) if step > 1e-9 else k * step for k in range(first, last + 1))

    def _powers(self, about: int) -> list[float]:
        low, high = (math.log(value, self.base) for value in (self.low, self.high))
        every = max(1, math.ceil((high - low) / about))
        decades = [
            float(self.base) ** k for k in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, every)
        ]
        if self.base == 2 or len(decades) >= 3:
            return decades
        found = [
            m * 10.0**k
            for k in range(math.floor(low), math.ceil(high) + 1)
            for m in (1.0, 2.0, 5.0)
            if self.low <= m * 10.0**k <= self.high
        ]
        return found if len(found) > 1 else list(self._linear(about))


def axis_of(values: FloatArray, base: int | None = None, from_zero: bool = False) -> Axis:
    """An axis that shows all values. Without a base: logarithmic where the values span more than a decade.

    `values` are finite; there may be none.
    """
    if not values.size:
        return Axis(0.0, 1.0)
    low, high = np.clip([values.min(), values.max()], -LARGEST, LARGEST).tolist()  # whose span is finite
    if base is None:
        base = 10 if low > 0 and high / low > LOGARITHMIC_FROM and not from_zero else 1
    if base > 1 and low > 0:
        edge = (high / low) ** PADDING if high > low else float(base)
        return Axis(low / edge, high * edge, base)
    if from_zero:
        low = min(0.0, low)
    edge = PADDING * (high - low) or max(abs(high), 1.0) * PADDING
    return Axis(low if from_zero and low == 0 else low - edge, high + edge)


def steps_axis(last: float, first: float = 0.0) -> Axis:
    return Axis(first, max(last, first + 1.0))


def short(value: float, step: float = 0.0) -> str:
    """A tick's text: 0.25, 20k, 1.5M, 1e-05. `step` is the distance of the ticks, for its digits."""
    if value == 0 or (step and abs(value) < step / 1e6):
        return "0"
    for size, unit in UNITS:
        if abs(value) >= size:
            return f"{_digits(value / size, step / size)}{unit}" if abs(value) < 1e15 else f"{value:.2g}"
    if abs(value) < 1e-3:
        return f"{value:.3g}"
    return _digits(value, step)


def _digits(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 3
    if step > 0 and not math.isclose(step * 10**decimals, round(step * 10**decimals), abs_tol=1e-6):
        decimals += 1  # steps of 2.5
    text = f"{value:.{min(decimals, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and step <= 0 else text
