"""Charts as inline SVG under labels in HTML, which keep their size at any width.

Owns their markup. The lines are drawn without a script; the page's script reads `data-x` and `data-y` for the
values under the pointer, and makes the plot a slider, whose value a screen reader says as keys move it. Each
chart has its values as a table too, for screen readers and for copying.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from launcher.errors import listed
from launcher.report.charts.axis import Axis
from launcher.report.curve import FloatArray
from launcher.report.html import hidden, table
from launcher.telemetry.formatting import number

DASHED = ("line", "mean", "steps")  # styles
KEY_WIDTH = 36  # pixels, of a line in the legend: more than one period of its dashes
LAYER_OPACITIES = (0.95, 0.65, 0.4, 0.2)  # of areas on top of each other
WIDTH, HEIGHT = 1000, 240  # of the drawing, which is stretched
MAX_ROWS = 12  # of a chart's table
MAX_AXIS_TITLE = 26  # characters
MAX_DESCRIBED = 6  # lines that the label of a chart describes


@dataclass(frozen=True)
class Line:
    """A named series. `style`: line, faint (behind its mean), mean, steps, dots, cross, lane or area.

    A lane has pairs of x. `values` are read out instead of y, where y is only a place. `color` also selects
    the dashes of a line, and `opacity` is that of an area, so that lines differ without colours too.
    """

    name: str
    color: int
    x: FloatArray
    y: FloatArray
    style: str = "line"
    values: FloatArray | None = None
    opacity: float = 0.75
    setting: int | None = None  # whose line this is, where settings can be chosen

    @property
    def look(self) -> str:
        """Colour, dashes and opacity, for the drawing and for its key in the legend."""
        dashes = f";--d:var(--d{self.color})" if self.style in DASHED else ""
        opacity = f";--o:{self.opacity:g}" if self.style == "area" else ""
        return f"--c:var(--s{self.color}){dashes}{opacity}"

    @property
    def shown(self) -> FloatArray:
        return self.y if self.values is None else self.values


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes.

    `unit` is that of y; `events` are vertical marks: x and what it is; `zones` are ranges of x with a name
    and a colour; `lanes` are names for y = 0, 1, ... instead of numbers.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    x_title: str = "step"
    events: Sequence[tuple[float, str]] = ()
    note: str = ""
    drawing: str = ""  # of the lines, where they are not drawn one by one
    zones: Sequence[tuple[float, float, str, int]] = ()
    lanes: Sequence[str] = ()
    has_legend: bool = True

    def markup(self) -> str:
        """The figure; "" without a point to show."""
        if not any(line.x.size for line in self.lines):
            return ""
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f'<figure class="chart" aria-label="{escape(self.title)}">'
            f"<figcaption><h3>{escape(self.title)}</h3></figcaption>"
            f"{'' if self.lanes or not self.has_legend else legend(self.lines)}"
            f"{self._plot()}{note}{self._values()}</figure>\n"
        )

    def _plot(self) -> str:
        drawing = "".join([*self._zones(), *self._grid(), *self._events(), self.drawing or self._lines()])
        low = " low" if self.lanes else ""
        return (
            f'<div class="plot{low}" tabindex="0" role="img" aria-label="{escape(self.description())}" '
            f'data-low="{self.x.low:g}" data-high="{self.x.high:g}" data-x-title="{escape(self.x_title)}"'
            f"{self._y_axis()}>"
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
            f"{drawing}</svg>"
            f"{''.join(self._labels())}</div>"
        )

    def _y_axis(self) -> str:
        """The title of the axis; also its range and base, from which the script can draw lines anew."""
        if self.lanes:
            return ""
        title = f"{self.title.partition(',')[0]}, {self.unit}" if self.unit else self.title
        shown = title if len(title) <= MAX_AXIS_TITLE else self.unit
        axis = "" if self.drawing else f' data-y="{self.y.low:g} {self.y.high:g} {self.y.base}"'
        return f' data-y-title="{escape(shown)}"{axis}'

    def description(self) -> str:
        """The chart in words: where each line begins and ends, and its extremes."""
        shown = [line for line in self.lines if line.x.size and line.style != "faint"]
        texts = [self._in_words(line) for line in shown[:MAX_DESCRIBED]]
        more = f"; {len(shown) - MAX_DESCRIBED} more" if len(shown) > MAX_DESCRIBED else ""
        marks = [f"{text} at {self.x_title} {number(x)}" for x, text in self.events]
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

    def _grid(self) -> Iterator[str]:
        for value, _ in self._y_ticks():
            yield f'<path class="grid" d="M0 {_down(self.y.place(value))}H{WIDTH}"/>'

    def _zones(self) -> Iterator[str]:
        for low, high, _, color in self.zones:
            left, right = _right(self.x.place(low)), _right(self.x.place(high))
            yield f'<path class="zone" style="--c:var(--s{color})" d="M{left} 0H{right}V{HEIGHT}H{left}Z"/>'

    def _y_ticks(self) -> list[tuple[float, str]]:
        return [(float(k), name) for k, name in enumerate(self.lanes)] if self.lanes else self.y.ticks()

    def _events(self) -> Iterator[str]:
        for x, _ in self.events:
            yield f'<path class="event" d="M{_right(self.x.place(x))} 0V{HEIGHT}"/>'

    def _lines(self) -> str:
        return "".join(self._line(line) for line in self.lines if line.x.size)

    def _line(self, line: Line) -> str:
        right = np.round(self.x.places(line.x) * WIDTH).tolist()
        down = np.round((1 - self.y.places(line.y)) * HEIGHT, 1).tolist()
        data = f'{_of(line)} data-name="{escape(line.name)}" data-x="{_numbers(line.x)}" '
        data += f'data-y="{_numbers(line.shown)}"'
        # A line of one point would be one pixel.
        style = "dots" if len(right) == 1 and line.style not in ("cross", "lane") else line.style
        return f'<path class="s {style}" style="{line.look}" d="{_path(right, down, style)}"{data}/>'

    def _labels(self) -> Iterator[str]:
        kind = "lane" if self.lanes else "y"
        for value, text in self._y_ticks():
            yield _label(kind, "bottom", self.y.place(value), _raised(text))
        for low, high, name, _ in self.zones:
            yield _label("zone-name", "left", (self.x.place(low) + self.x.place(high)) / 2, escape(name))
        for value, text in self.x.ticks():
            yield _label("x", "left", self.x.place(value), escape(text))
        for x, text in self.events:
            yield _label("mark", "left", self.x.place(x), "", f' title="{escape(text)}"')

    def _values(self) -> str:
        """Each line at some of its points."""
        rows = []
        shown = [line for line in self.lines if line.x.size and line.style != "faint"]
        for line in shown[:MAX_DESCRIBED]:
            places = np.unique(np.linspace(0, line.x.size - 1, MAX_ROWS).round().astype(int))
            rows += [
                {
                    "series": line.name,
                    self.x_title: number(float(line.x[k])),
                    ("step" if self.lanes else self.unit or "value"): number(float(line.shown[k])),
                }
                for k in places
            ]
        name = f"Values of {self.title}"
        summary = f"Values{hidden(name.removeprefix('Values'))}"
        return f'<details class="values"><summary>{summary}</summary>{table(name, rows)}</details>'


def legend(lines: Sequence[Line]) -> str:
    """The names of the lines, each as it is drawn; none for a single line."""
    named = {line.name: line for line in lines if line.x.size and line.style != "faint"}
    if len(named) < 2:
        return ""
    items = "".join(
        f'<li title="{escape(name)}"{_of(line)}>{_key(line)}<span>{escape(name)}</span></li>'
        for name, line in named.items()
    )
    return f'<ul class="legend">{items}</ul>'


def _of(line: Line) -> str:
    return "" if line.setting is None else f' data-of="{line.setting}"'


def _key(line: Line) -> str:
    if line.style not in DASHED:
        return f'<i class="key {line.style}" style="{line.look}"></i>'
    return (
        f'<svg class="key" width="{KEY_WIDTH}" height="6" aria-hidden="true">'
        f'<path class="s {line.style}" style="{line.look}" d="M0 3H{KEY_WIDTH}"/></svg>'
    )


def stacked(
    title: str, unit: str, x: FloatArray, layers: Sequence[tuple[str, FloatArray]], axis: Axis
) -> str:
    """Areas on top of each other: their heights are the layers' values at x."""
    if not x.size:
        return ""
    total = np.sum([values for _, values in layers], axis=0)
    high = Axis(0.0, float(total.max()) * 1.05 or 1.0)
    lines, areas, below = [], [], np.zeros_like(x)
    for color, (name, values) in enumerate(layers):
        above = below + values
        right = np.round(axis.places(x) * WIDTH, 1).tolist()
        top, bottom = (np.round((1 - high.places(v)) * HEIGHT, 1).tolist() for v in (above, below))
        corners = [*zip(right, top, strict=True), *zip(right[::-1], bottom[::-1], strict=True)]
        path = "M" + "L".join(f"{a:g} {b:g}" for a, b in corners) + "Z"
        layer = Line(name, color, x, values, "area", opacity=LAYER_OPACITIES[color % len(LAYER_OPACITIES)])
        areas.append(
            f'<path class="s area" style="{layer.look}" d="{path}" data-name="{escape(name)}" '
            f'data-x="{_numbers(x)}" data-y="{_numbers(values)}"/>'
        )
        lines.append(layer)
        below = above
    return Chart(title, unit, lines, axis, high, drawing="".join(areas)).markup()


def _path(right: Sequence[float], down: Sequence[float], style: str) -> str:
    points = list(zip(right, down, strict=True))
    if style in ("dots", "cross"):  # a line of length 0 with round ends is a dot
        return "".join(f"M{a:g} {b:g}h0" for a, b in points)
    if style == "lane":
        return "".join(
            f"M{a:g} {b:g}H{c:g}" for (a, b), (c, _) in zip(points[::2], points[1::2], strict=False)
        )
    if style == "steps":
        first, *rest = points
        return f"M{first[0]:g} {first[1]:g}" + "".join(f"H{a:g}V{b:g}" for a, b in rest)
    return "M" + "L".join(f"{a:g} {b:g}" for a, b in points)


def _numbers(values: FloatArray) -> str:
    return " ".join(f"{value:.5g}" if value % 1 else f"{value:.0f}" for value in values.tolist())


def _label(kind: str, side: str, place: float, inner: str, more: str = "") -> str:
    """Beside the drawing. Hidden from screen readers, which get the description and the values."""
    return f'<span class="{kind}" aria-hidden="true" style="{side}:{100 * place:.1f}%"{more}>{inner}</span>'


def _right(place: float) -> str:
    return f"{place * WIDTH:.1f}"


def _down(place: float) -> str:
    return f"{(1 - place) * HEIGHT:.1f}"


def _raised(text: str) -> str:
    base, hat, power = text.partition("^")
    return f"{escape(base)}<sup>{escape(power)}</sup>" if hat else escape(text)
