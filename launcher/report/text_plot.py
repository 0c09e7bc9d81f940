"""A curve in characters, for a terminal of any size: braille dots, or asterisks where there is only ASCII."""

from __future__ import annotations

import numpy as np

from launcher.report.charts.axis import axis_of, short
from launcher.report.curve import Curve, FloatArray

LABEL_WIDTH = 7
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character: [row][column]


def plot_lines(curve: Curve, width: int, height: int, braille: bool = True) -> list[str]:
    """`height` lines of at most `width` characters; none without two points or without room."""
    columns = width - LABEL_WIDTH - 1
    x, y = curve.points(2 * max(1, columns))
    if x.size < 2 or columns < 4 or height < 2:
        return []
    axis = axis_of(y)
    across, down = (2, 4) if braille else (1, 1)
    marked = _marked(x, axis.places(y), columns * across, height * down)
    rows = [_characters(marked[k * down : (k + 1) * down], columns, braille) for k in range(height)]
    labels = {0: short(axis.high, axis.high - axis.low), height - 1: short(axis.low, axis.high - axis.low)}
    return [f"{labels.get(k, '')[:LABEL_WIDTH]:>{LABEL_WIDTH}} {row}".rstrip() for k, row in enumerate(rows)]


def _marked(
    x: FloatArray, places: FloatArray, columns: int, rows: int
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Which dots the line touches, [rows, columns]; row 0 is the top."""
    column = np.round((x - x[0]) / (x[-1] - x[0]) * (columns - 1)).astype(int)
    row = np.round((1 - np.clip(places, 0.0, 1.0)) * (rows - 1)).astype(int)
    dots = np.zeros((rows, columns), dtype=bool)
    for k in range(x.size - 1):
        length = max(abs(column[k + 1] - column[k]), abs(row[k + 1] - row[k]), 1)
        share = np.arange(length + 1) / length
        at_row = np.round(row[k] + share * (row[k + 1] - row[k])).astype(int)
        at_column = np.round(column[k] + share * (column[k + 1] - column[k])).astype(int)
        dots[at_row, at_column] = True
    return dots


def _characters(dots: np.ndarray[tuple[int, int], np.dtype[np.bool_]], columns: int, braille: bool) -> str:
    if not braille:
        return "".join("*" if dot else " " for dot in dots[0])
    found = []
    for column in range(columns):
        code = sum(DOTS[row][side] for row in range(4) for side in range(2) if dots[row, 2 * column + side])
        found.append(chr(BRAILLE + code) if code else " ")
    return "".join(found)
