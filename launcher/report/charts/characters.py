"""A chart in characters, for a terminal of any size: braille dots, or asterisks where there is only ASCII."""

from __future__ import annotations

import numpy as np

from launcher.report.charts.chart import Axis, Chart, Line, axis_of, short
from launcher.report.curve import Curve

LABEL_WIDTH = 7  # of the numbers beside the axis, such as 1.5e-05
BRAILLE = 0x2800  # the empty one of Unicode's braille patterns; each dot adds its bit
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # of a character: [row, column]
ASTERISK = np.array([[1]])


def curve_chart(title: str, curve: Curve) -> Chart:
    """One curve from its first point to its last."""
    x, y = curve.points()
    across = Axis(float(x[0]), float(x[-1])) if x.size > 1 else Axis(0.0, 1.0)
    return Chart(title, "", [Line(title, 0, x, y)], across, axis_of(y))


def characters(chart: Chart, width: int, height: int, braille: bool = True) -> list[str]:
    """`height` lines of at most `width` characters; none without a line of two points or without room."""
    columns = width - LABEL_WIDTH - 1
    shapes = [shape for line in chart.present for shape in chart.shapes(line) if len(shape) > 1]
    if not shapes or columns < 4 or height < 2:
        return []
    bits = DOTS if braille else ASTERISK
    down, across = bits.shape
    dots = np.zeros((height * down, columns * across), dtype=bool)
    for shape in shapes:
        corners = (np.clip(shape, 0.0, 1.0) * (1, -1) + (0, 1)) * (columns * across - 1, height * down - 1)
        for begin, end in zip(corners[:-1].round(), corners[1:].round(), strict=True):
            length = int(max(abs(end - begin)))
            column, row = np.linspace(begin, end, length + 1).round().astype(int).T
            dots[row, column] = True
    codes = (dots.reshape(height, down, columns, across) * bits[:, None, :]).sum(axis=(1, 3))
    high, low = _ends(chart.y)
    labels = [high, *[""] * (height - 2), low]
    marks = [[" " if not code else chr(BRAILLE + code) if braille else "*" for code in row] for row in codes]
    return [
        f"{label:>{LABEL_WIDTH}} {''.join(row)}".rstrip() for label, row in zip(labels, marks, strict=True)
    ]


def _ends(axis: Axis) -> tuple[str, str]:
    """The highest and the lowest value, in digits that tell them apart where there is room for these."""
    texts = [(short(axis.high, digits), short(axis.low, digits)) for digits in (4, 5, 6, 3, 2, 1)]
    fitting = [ends for ends in texts if max(map(len, ends)) <= LABEL_WIDTH]
    return next((ends for ends in fitting if ends[0] != ends[1]), fitting[0])
