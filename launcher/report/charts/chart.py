"""What a chart shows: lines over one pair of axes, with zones.

Axes have a range, ticks and their texts, on a linear scale or in powers of 2 or 10.

Pure: knows no markup and no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.report.curve import FloatArray

DASHED = ("line", "mean", "steps")  # styles
BAR_WIDTH = 0.86  # of the distance between bars, which stand at whole numbers
LOGARITHMIC_FROM = 20.0  # largest over smallest value, which would lie in the lowest 5 % of a linear axis
PADDING = 0.05  # of the range, above and below
LARGEST = 1e300  # of both ends, so that the span between them is finite
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Line:
    """A named series. `style`: line, faint (behind its mean), mean, steps, dots, cross or bars.

    `color` also selects the dashes of a line, and `opacity` is that of bars, so that lines differ without
    colours too.
    """

    name: str
    color: int
    x: FloatArray
    y: FloatArray
    style: str = "line"
    opacity: float = 0.75

    @property
    def drawn_as(self) -> str:
        """The style. A line of one point would be invisible, so it is drawn as a dot."""
        return "dots" if self.x.size == 1 and self.style not in ("cross", "bars") else self.style


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes.

    `unit` is that of y; `zones` are ranges of x with a name and a colour.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    x_title: str = "step"
    note: str = ""
    zones: Sequence[tuple[float, float, str, int]] = ()

    @property
    def present(self) -> list[Line]:
        """The lines that have a point."""
        return [line for line in self.lines if line.x.size]

    @property
    def named(self) -> list[Line]:
        """The lines that have a point and are not behind their mean."""
        return [line for line in self.present if line.style != "faint"]

    @property
    def legend(self) -> list[Line]:
        """The lines that a legend names, each name once; none for a single line."""
        found = {line.name: line for line in self.named}
        return list(found.values()) if len(found) > 1 else []

    def shapes(self, line: Line) -> list[FloatArray]:
        """The line's strokes, dots or outlines, each [points, (x, y)], from (0, 0) lower left to (1, 1)."""
        points = np.stack([self.x.places(line.x), self.y.places(line.y)], axis=1)
        match line.drawn_as:
            case "dots" | "cross":
                return list(points[:, None])
            case "steps":  # across, then up or down
                return [np.stack([points[:, 0].repeat(2)[1:], points[:, 1].repeat(2)[:-1]], axis=1)]
            case "bars":
                right = self.x.places(line.x + BAR_WIDTH)
                return [
                    np.array([(a, 0), (a, y), (b, y), (b, 0)])
                    for (a, y), b in zip(points, right, strict=True)
                ]
        return [points]


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
        power_of_two = self.base == 2 and all(math.log2(value).is_integer() for value in values)
        return [(v, f"2^{round(math.log2(v))}" if power_of_two else short(v)) for v in values]

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
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, every)
        if self.base == 2 or len(powers) >= 3:
            return [float(self.base) ** k for k in powers]
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
    edge = PADDING * (high - low) or PADDING * (abs(high) or 1.0)
    return Axis(low if from_zero and low == 0 else low - edge, high + edge)


def steps_axis(last: float, first: float = 0.0) -> Axis:
    return Axis(first, max(last, first + 1.0))


def short(value: float, digits: int = 10) -> str:
    """A tick's text: 0.25, 20k, 1.5M, 1e-05."""
    size, unit = next((each for each in UNITS if each[0] <= abs(value) < 1e15), (1.0, ""))
    return f"{value / size:.{digits}g}{unit}"
