"""Charts as PNG files for trackers and READMEs.

Owns their look, with the colours and dashes of the page. Drawn by Pillow in any process, without a display:
matplotlib took 3 s of CPU time at the end of a run, 0.7 of them to import it; this takes 0.2.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from launcher.report.charts.chart import DASHED, FILLED, Chart, Line
from launcher.report.curve import FloatArray
from launcher.report.html import ASSETS
from launcher.run_dir.atomic import write_content

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

SCALE = 3  # pixels drawn for one that is written, which smooths lines and letters
WIDTH, HEIGHT = 600, 396  # of one chart
INK, SOFT, GRID, BAD = "#1c2127", "#5b6570", "#e3e6ea", "#b3261e"  # those of the page on white
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 46  # around the plot
KEY, ROW, BETWEEN = 32, 20, 18  # of a legend: widths of a line, height of a row, width between two names
MAX_NAME = 48  # characters of a name in a legend, and of a lane
MARKED = 30  # points; a line of fewer has a mark at each
OPACITIES = {"faint": 0.4, **dict.fromkeys(("line", "mean", "steps", "dots"), 1.0)}  # areas have their own
Place = Sequence[float] | FloatArray  # x and y
WIDTHS = {"faint": 1.0, "mean": 2.2, "lane": 9.0}  # of lines; 1.6 for the others


def write_picture(charts: Sequence[Chart], path: Path, columns: int = 2, height: int = HEIGHT) -> Path:
    """Write the charts to one PNG, row by row. Raises OSError."""
    columns = min(columns, len(charts))
    canvas = Canvas(columns * WIDTH, -(-len(charts) // columns) * height)
    for k, chart in enumerate(charts):
        _draw(canvas, chart, k % columns * WIDTH, k // columns * height, height)
    write_content(path, canvas.png())
    return path


def _draw(canvas: Canvas, chart: Chart, x: int, y: int, height: int) -> None:
    names = [name[:MAX_NAME] for name in chart.lanes]
    left = x + max([LEFT, *(16 + text_length(name, 10) for name in names)])
    keys, rows = _legend(canvas, chart, left, y + 42)
    width, top = x + WIDTH - RIGHT - left, y + TOP + ROW * rows
    size = np.array([width, y + height - BOTTOM - top])

    def placed(shape: FloatArray | tuple[float, float]) -> FloatArray:
        """From the unit square to pixels, whose y grows downwards."""
        found: FloatArray = np.array([left, top]) + (np.asarray(shape, float) * (1, -1) + (0, 1)) * size
        return found

    for begin, end, name, color in chart.zones:
        low, high = chart.x.place(begin), chart.x.place(end)
        canvas.polygon(placed(np.array([(low, 0), (low, 1), (high, 1), (high, 0)])), mixed(color, 0.09))
        canvas.text(placed(((low + high) / 2, 1)) + np.array([0, 10]), name, 11, "mm", SOFT)
    for value, text in chart.y_ticks():
        (a, b), (c, _) = placed((0, chart.y.place(value))), placed((1, 0))
        canvas.line([(a, b), (c, b)], GRID, 1)
        base, _, power = ("", "", "") if chart.lanes else text.partition("^")
        canvas.text((a - 8, b - (4 if power else 0)), power, 8, "rm", SOFT)
        canvas.text(
            (a - 8 - text_length(power, 8), b), base or text[:MAX_NAME], 10 if chart.lanes else 12, "rm", SOFT
        )
    for value, text in chart.x.ticks():
        canvas.text(placed((chart.x.place(value), 0)) + np.array([0, 14]), text, 12, "mm", SOFT)
    for value, _ in chart.marks:
        canvas.line(placed(np.array([(chart.x.place(value), k) for k in (0, 1)])), mixed(6, 1.0), 1, (3, 3))
    for line in chart.present:
        for shape in chart.shapes(line):
            _stroke(canvas, line, placed(shape))
        if line.drawn_as in ("line", "mean") and line.x.size < MARKED:
            for point in chart.shapes(replace(line, style="dots")):
                _stroke(canvas, replace(line, style="dots"), placed(point))
    canvas.line(placed(np.array([(0, 0), (1, 0)])), SOFT, 1)
    if not chart.present:
        canvas.text(placed((0.5, 0.5)), "not recorded", 13, "mm", SOFT)
    for key, (a, b) in keys:
        _draw_key(canvas, key, a, b)
    title = f"{chart.title}, {chart.unit}" if chart.unit and not chart.lanes else chart.title
    canvas.text((left, y + 22), title, 14, "lm", INK, is_bold=True)
    canvas.text((x + WIDTH - RIGHT, y + 22), chart.note, 12, "rm", SOFT)
    canvas.text((left + width / 2, y + height - 12), chart.x_title, 12, "mm", SOFT)


def _stroke(canvas: Canvas, line: Line, shape: FloatArray) -> None:
    """One stroke, dot or outline of the line."""
    color = mixed(line.color, OPACITIES.get(line.style, line.opacity))
    if line.style in FILLED:
        canvas.polygon(shape, color)
    elif line.drawn_as in ("dots", "cross"):
        canvas.dot(shape[0], 3, BAD if line.style == "cross" else color)
    else:
        dashes = _dashes()[line.color] if line.style in DASHED else ()
        canvas.line(shape, color, WIDTHS.get(line.style, 1.6), dashes)


def _legend(
    canvas: Canvas, chart: Chart, left: float, top: float
) -> tuple[list[tuple[Line, tuple[float, float]]], int]:
    """Where each name is, and the number of rows."""
    keys, x, row = [], left, 0
    right = left - LEFT + WIDTH - RIGHT
    for line in chart.legend:
        width = KEY + 6 + text_length(line.name[:MAX_NAME], 12) + BETWEEN
        if x > left and x + width - BETWEEN > right:
            x, row = left, row + 1
        keys.append((line, (x, top + ROW * row)))
        x += width
    return keys, row + 1 if keys else 0


def _draw_key(canvas: Canvas, line: Line, x: float, y: float) -> None:
    if line.style in FILLED:
        shape = [(x + 8, y - 5), (x + 8, y + 5), (x + KEY, y + 5), (x + KEY, y - 5)]
    else:
        shape = [(x, y), (x + KEY, y)] if line.style in (*DASHED, "lane") else [(x + KEY / 2, y)]
    _stroke(canvas, replace(line, x=line.x.repeat(2)), np.array(shape))
    canvas.text((x + KEY + 6, y), line.name[:MAX_NAME], 12, "lm", INK)


class Canvas:
    """A white picture, in its own pixels whatever the scale at which it is drawn."""

    def __init__(self, width: float, height: float) -> None:
        from PIL import Image, ImageDraw

        self._image = Image.new("RGB", (round(width) * SCALE, round(height) * SCALE), "white")
        self._draw = ImageDraw.Draw(self._image)

    def text(
        self, place: Place, text: str, size: int, anchor: str, color: str, is_bold: bool = False
    ) -> None:
        """Write the text with its anchor (as in Pillow) at the place."""
        x, y = place
        self._draw.text((x * SCALE, y * SCALE), text, color, _font(size, is_bold), anchor)

    def image(self, pixels: NDArray[np.uint8], left: float, top: float, side: float) -> None:
        """Draw [rows, columns, RGB] as a square."""
        from PIL import Image

        square = Image.fromarray(pixels).resize((round(side * SCALE),) * 2, Image.Resampling.NEAREST)
        self._image.paste(square, (round(left * SCALE), round(top * SCALE)))

    def line(
        self,
        points: FloatArray | Sequence[Sequence[float]],
        color: str,
        width: float,
        dashes: Sequence[float] = (),
    ) -> None:
        for part in _parts(np.asarray(points, float), dashes):
            xy = [(x, y) for x, y in (part * SCALE).tolist()]
            self._draw.line(xy, color, round(width * SCALE), joint="curve")

    def polygon(self, points: FloatArray, color: str) -> None:
        self._draw.polygon([(x, y) for x, y in (points * SCALE).tolist()], color)

    def dot(self, place: Place, radius: float, color: str) -> None:
        self._draw.ellipse([(v + d * radius) * SCALE for d in (-1, 1) for v in place], color)

    def png(self) -> bytes:
        content = io.BytesIO()
        self._image.reduce(SCALE).save(content, "png")
        return content.getvalue()


def _parts(points: FloatArray, dashes: Sequence[float]) -> Iterable[FloatArray]:
    """The line cut into its dashes; `dashes` are the lengths of strokes and gaps in turn."""
    at = np.concatenate([[0.0], np.hypot(*np.diff(points, axis=0).T).cumsum()])  # length up to each point
    if not dashes or at[-1] == 0:
        return [points]
    ends = np.tile(dashes, int(at[-1] / sum(dashes)) + 1).cumsum()
    cuts = np.concatenate([[0.0], ends])
    return [
        np.stack(
            [
                np.interp(np.concatenate([[a], at[(at > a) & (at < b)], [b]]), at, points[:, k])
                for k in (0, 1)
            ],
            axis=1,
        )
        for a, b in zip(cuts[:-1:2], cuts[1::2], strict=False)
    ]


def text_length(text: str, size: int) -> float:
    return float(_font(size).getlength(text)) / SCALE


def mixed(color: int, opacity: float) -> str:
    """The colour with this number on white."""
    return "#" + "".join(f"{round(255 + opacity * (part - 255)):02x}" for part in rgb(color))


def rgb(color: int) -> tuple[int, ...]:
    """The colour with this number, of the lines of the page in its light theme."""
    return tuple(bytes.fromhex(_colors()[color]))


@cache
def _colors() -> list[str]:
    return re.findall(r"--s\d: #(\w{6})", _style())


@cache
def _dashes() -> list[tuple[float, ...]]:
    found = re.findall(r"--d\d: ([^;]+);", _style())
    return [tuple(map(float, each.split())) if each != "none" else () for each in found]


def _style() -> str:
    return (ASSETS / "page.css").read_text(encoding="utf-8")


@cache
def _font(size: int, is_bold: bool = False) -> FreeTypeFont | ImageFont:
    """DejaVu, which matplotlib ships: class names have letters that Pillow's own font lacks."""
    from PIL import ImageFont

    found = importlib.util.find_spec("matplotlib")  # finds it without importing it
    name = f"DejaVuSans{'-Bold' if is_bold else ''}.ttf"
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "mpl-data/fonts/ttf" / name
        if file.is_file():
            return ImageFont.truetype(str(file), size * SCALE)
    return ImageFont.load_default(size * SCALE)
