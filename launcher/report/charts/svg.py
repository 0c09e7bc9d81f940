"""Charts as inline SVG under labels in HTML, which keep their size at any width.

Owns their markup. The lines are drawn without a script; the page's script reads `data-x` and `data-y` for the
values under the pointer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from launcher.report.charts.chart import DASHED, Chart, Line
from launcher.report.curve import FloatArray

KEY_WIDTH = 36  # pixels, of a line in the legend: more than one period of its dashes
WIDTH, HEIGHT = 1000, 240  # of the drawing, which is stretched
MAX_AXIS_TITLE = 26  # characters


def markup(chart: Chart) -> str:
    """The figure; "" without a point to show."""
    if not chart.present:
        return ""
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="chart" aria-label="{escape(chart.title)}">'
        f"<figcaption><h3>{escape(chart.title)}</h3></figcaption>{legend(chart.legend)}{_plot(chart)}{note}"
        "</figure>\n"
    )


def legend(lines: Sequence[Line]) -> str:
    """The names of the lines, each as it is drawn."""
    items = "".join(
        f'<li title="{escape(line.name)}">{_key(line)}<span>{escape(line.name)}</span></li>' for line in lines
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def _plot(chart: Chart) -> str:
    drawing = "".join([*_behind(chart), *(_path(chart, line) for line in chart.present)])
    return (
        f'<div class="plot" role="img" aria-label="{escape(chart.title)}" '
        f'data-low="{chart.x.low:g}" data-high="{chart.x.high:g}" data-x-title="{escape(chart.x_title)}" '
        f'data-y-title="{escape(_y_title(chart))}">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{drawing}</svg>'
        f"{''.join(_labels(chart))}</div>"
    )


def _y_title(chart: Chart) -> str:
    title = f"{chart.title.partition(',')[0]}, {chart.unit}" if chart.unit else chart.title
    return title if len(title) <= MAX_AXIS_TITLE else chart.unit


def _behind(chart: Chart) -> Iterator[str]:
    """Zones and grid."""
    for low, high, _, color in chart.zones:
        left, right = _right(chart.x.place(low)), _right(chart.x.place(high))
        yield f'<path class="zone" style="--c:var(--s{color})" d="M{left} 0H{right}V{HEIGHT}H{left}Z"/>'
    for value, _ in chart.y.ticks():
        yield f'<path class="grid" d="M0 {(1 - chart.y.place(value)) * HEIGHT:.1f}H{WIDTH}"/>'


def _path(chart: Chart, line: Line) -> str:
    style = line.drawn_as
    # A line of length 0 with round ends is a dot.
    end = "h0" if style in ("dots", "cross") else "Z" if style == "bars" else ""
    places = "".join(
        "M" + "L".join(f"{a:g} {b:g}" for a, b in _placed(shape)) + end for shape in chart.shapes(line)
    )
    return (
        f'<path class="s {style}" style="{_look(line)}" d="{places}" '
        f'data-name="{escape(line.name)}" data-x="{_numbers(line.x)}" data-y="{_numbers(line.y)}"/>'
    )


def _placed(shape: FloatArray) -> list[list[float]]:
    placed: list[list[float]] = np.round((shape * (1, -1) + (0, 1)) * (WIDTH, HEIGHT), 1).tolist()
    return placed


def _look(line: Line) -> str:
    """Colour, dashes and opacity, for the drawing and for its key in the legend."""
    dashes = f";--d:var(--d{line.color})" if line.style in DASHED else ""
    opacity = f";--o:{line.opacity:g}" if line.style == "bars" else ""
    return f"--c:var(--s{line.color}){dashes}{opacity}"


def _key(line: Line) -> str:
    if line.style not in DASHED:
        return f'<i class="key {line.style}" style="{_look(line)}"></i>'
    return (
        f'<svg class="key" width="{KEY_WIDTH}" height="6" aria-hidden="true">'
        f'<path class="s {line.style}" style="{_look(line)}" d="M0 3H{KEY_WIDTH}"/></svg>'
    )


def _labels(chart: Chart) -> Iterator[str]:
    for value, text in chart.y.ticks():
        base, hat, power = escape(text).partition("^")
        raised = f"{base}<sup>{power}</sup>" if hat else escape(text)
        yield _label("y", "bottom", chart.y.place(value), raised)
    for low, high, name, _ in chart.zones:
        yield _label("zone-name", "left", (chart.x.place(low) + chart.x.place(high)) / 2, escape(name))
    for value, text in chart.x.ticks():
        yield _label("x", "left", chart.x.place(value), escape(text))


def _label(kind: str, side: str, place: float, inner: str) -> str:
    """Beside the drawing. Hidden from screen readers, which get the description and the values."""
    return f'<span class="{kind}" aria-hidden="true" style="{side}:{100 * place:.1f}%">{inner}</span>'


def _numbers(values: FloatArray) -> str:
    return " ".join(f"{value:.5g}" if value % 1 else f"{value:.0f}" for value in values.tolist())


def _right(place: float) -> str:
    return f"{place * WIDTH:.1f}"
