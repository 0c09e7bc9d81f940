"""What a chart shows: lines over one pair of axes, with marks, zones and lanes, and the same in words.

The one description from which `svg` draws on the page, `picture` into a PNG and `characters` in a terminal.
Pure: knows no markup and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.errors import listed
from launcher.report.charts.axis import Axis
from launcher.report.curve import FloatArray
from launcher.telemetry.formatting import number

DASHED = ("line", "mean", "steps")  # styles
FILLED = ("area", "bars")
BAR_WIDTH = 0.86  # of the distance between bars, which stand at whole numbers
LAYER_OPACITIES = (0.95, 0.65, 0.4, 0.2)  # of areas on top of each other
MAX_ROWS = 12  # of the table of a line
MAX_DESCRIBED = 6  # lines that the label of a chart describes


@dataclass(frozen=True)
class Line:
    """A named series. `style`: line, faint (behind its mean), mean, steps, dots, cross, lane, area or bars.

    A lane has pairs of x. An area reaches from `below` to y. `values` are read out instead of y, where y is
    only a place. `color` also selects the dashes of a line, and `opacity` is that of an area, so that lines
    differ without colours too.
    """

    name: str
    color: int
    x: FloatArray
    y: FloatArray
    style: str = "line"
    values: FloatArray | None = None
    below: FloatArray | None = None
    opacity: float = 0.75
    setting: int | None = None  # whose line this is, where settings can be chosen

    @property
    def shown(self) -> FloatArray:
        return self.y if self.values is None else self.values

    @property
    def drawn_as(self) -> str:
        """The style. A line of one point would be invisible, so it is drawn as a dot."""
        return "dots" if self.x.size == 1 and self.style not in ("cross", "lane", *FILLED) else self.style


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes.

    `unit` is that of y; `marks` are vertical lines: x and what it is; `zones` are ranges of x with a name
    and a colour; `lanes` are names for y = 0, 1, ... instead of numbers.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    x_title: str = "step"
    marks: Sequence[tuple[float, str]] = ()
    note: str = ""
    zones: Sequence[tuple[float, float, str, int]] = ()
    lanes: Sequence[str] = ()
    has_legend: bool = True

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
        return list(found.values()) if self.has_legend and len(found) > 1 else []

    def y_ticks(self) -> list[tuple[float, str]]:
        return [(float(k), name) for k, name in enumerate(self.lanes)] if self.lanes else self.y.ticks()

    def shapes(self, line: Line) -> list[FloatArray]:
        """The line's strokes, dots or outlines, each [points, (x, y)], from (0, 0) lower left to (1, 1)."""
        points = np.stack([self.x.places(line.x), self.y.places(line.y)], axis=1)
        match line.drawn_as:
            case "dots" | "cross":
                return list(points[:, None])
            case "lane":
                return [points[k : k + 2] for k in range(0, len(points) - 1, 2)]
            case "steps":  # across, then up or down
                return [np.stack([points[:, 0].repeat(2)[1:], points[:, 1].repeat(2)[:-1]], axis=1)]
            case "area":
                below = np.zeros_like(line.x) if line.below is None else line.below
                base = np.stack([points[:, 0], self.y.places(below)], axis=1)
                return [np.concatenate([points, base[::-1]])]
            case "bars":
                right = self.x.places(line.x + BAR_WIDTH)
                return [
                    np.array([(a, 0), (a, y), (b, y), (b, 0)])
                    for (a, y), b in zip(points, right, strict=True)
                ]
        return [points]

    def description(self) -> str:
        """The chart in words: where each line begins and ends, and its extremes."""
        texts = [self._in_words(line) for line in self.named[:MAX_DESCRIBED]]
        more = f"; {len(self.named) - MAX_DESCRIBED} more" if len(self.named) > MAX_DESCRIBED else ""
        marks = [f"{text} at {self.x_title} {number(x)}" for x, text in self.marks]
        marked = f" Marks: {listed(marks, MAX_DESCRIBED)}." if marks else ""
        return f"{self.title}{f' in {self.unit}' if self.unit else ''}. {'; '.join(texts)}{more}.{marked}"

    def _in_words(self, line: Line) -> str:
        first, last = number(float(line.x[0])), number(float(line.x[-1]))
        if self.lanes:
            times = f"at {first}" if line.x.size == 1 else f"{line.x.size:,} from {first} to {last}"
            return f"{line.name}: {f'{first} to {last}' if line.style == 'lane' else times}"
        return (
            f"{line.name}: {number(float(line.shown[0]))} at {self.x_title} {first}, "
            f"{number(float(line.shown[-1]))} at {last}, "
            f"lowest {number(float(line.shown.min()))}, highest {number(float(line.shown.max()))}"
        )

    def rows(self) -> list[dict[str, str]]:
        """The rows of a table with each line at some of its points."""
        value = "step" if self.lanes else self.unit or "value"
        return [
            {"series": line.name, self.x_title: number(float(line.x[k])), value: number(float(line.shown[k]))}
            for line in self.named[:MAX_DESCRIBED]
            for k in np.unique(np.linspace(0, line.x.size - 1, MAX_ROWS).round().astype(int))
        ]


def stacked(
    title: str, unit: str, x: FloatArray, layers: Sequence[tuple[str, FloatArray]], axis: Axis
) -> Chart:
    """Areas on top of each other: their heights are the layers' values at x."""
    tops = np.cumsum([np.zeros_like(x), *(values for _, values in layers)], axis=0)
    lines = [
        Line(name, k, x, tops[k + 1], "area", values, tops[k], LAYER_OPACITIES[k % len(LAYER_OPACITIES)])
        for k, (name, values) in enumerate(layers)
    ]
    return Chart(title, unit, lines, axis, Axis(0.0, float(tops[-1].max(initial=0.0)) * 1.05 or 1.0))
