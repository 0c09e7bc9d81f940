"""Charts as PNG files for trackers and READMEs, in the colours and dashes of the page.

Owns smoothing, fonts and colours. Pillow, imported where a picture is made, takes 0.2 s of CPU time at the
end of a run; matplotlib took 3, of which 0.7 were its import.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator, Sequence
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

WIDTH, HEIGHT = 600, 396  # of one chart
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 46  # around the plot
KEY, ROW, BETWEEN = 32, 20, 18  # of a legend: widths of a line, height of a row, width between two names
MAX_NAME = 48  # characters of a name in a legend, and of a lane
MARKED = 30  # points; a line of fewer has a mark at each
OPACITIES = {"faint": 0.4, **dict.fromkeys(("line", "mean", "steps", "dots"), 1.0)}  # areas have their own
WIDTHS = {"faint": 1.0, "mean": 2.2, "lane": 9.0}  # of lines; 1.6 for the others
SCALE = 3  # pixels drawn for one that is written, which smooths lines and letters
INK, SOFT, GRID, BAD = "#1c2127", "#5b6570", "#e3e6ea", "#b3261e"  # those of the page on white
Place = Sequence[float] | FloatArray  # x and y


def write_picture(charts: Sequence[Chart], path: Path, columns: int = 2, height: int = HEIGHT) -> Path:
    """Write the charts to one PNG, row by row. Raises OSError."""
    columns = min(columns, len(charts))
    canvas = Canvas(columns * WIDTH, -(-len(charts) // columns) * height)
    for k, chart in enumerate(charts):
        _Panel(canvas, chart, k % columns * WIDTH, k // columns * height, height).draw()
    write_content(path, canvas.png())
    return path


class _Panel:
    """One chart at its place in the picture: title, legend, plot and axes from top to bottom."""

    def __init__(self, canvas: Canvas, chart: Chart, x: int, y: int, height: int) -> None:
        self._canvas, self._chart = canvas, chart
        self._y, self._height = y, height
        self._left = x + max([LEFT, *(16 + text_length(name[:MAX_NAME], 10) for name in chart.lanes)])
        self._right = x + WIDTH - RIGHT
        self._keys = self._legend()
        rows = self._keys[-1][2] + 1 if self._keys else 0
        self._corner = np.array([self._left, y + TOP + ROW * rows])  # of the plot, upper left
        self._size = np.array([self._right, y + height - BOTTOM]) - self._corner

    def draw(self) -> None:
        canvas, chart = self._canvas, self._chart
        self._zones_and_grid()
        self._lines()
        canvas.line(self._placed([(0, 0), (1, 0)]), SOFT, 1)
        if not chart.present:
            canvas.text(self._placed([0.5, 0.5]), "not recorded", 13, "mm", SOFT)
        for line, x, row in self._keys:
            self._key(line, x, self._y + 42 + ROW * row)
        title = f"{chart.title}, {chart.unit}" if chart.unit and not chart.lanes else chart.title
        canvas.text((self._left, self._y + 22), title, 14, "lm", INK, is_bold=True)
        canvas.text((self._right, self._y + 22), chart.note, 12, "rm", SOFT)
        middle = (self._left + self._right) / 2
        canvas.text((middle, self._y + self._height - 12), chart.x_title, 12, "mm", SOFT)

    def _placed(self, shape: FloatArray | Sequence[object]) -> FloatArray:
        """Map the unit square to pixels, whose y grows downwards."""
        found: FloatArray = self._corner + (np.asarray(shape, float) * (1, -1) + (0, 1)) * self._size
        return found

    def _zones_and_grid(self) -> None:
        canvas, chart = self._canvas, self._chart
        for begin, end, name, color in chart.zones:
            low, high = chart.x.place(begin), chart.x.place(end)
            outline = self._placed([(low, 0), (low, 1), (high, 1), (high, 0)])
            canvas.polygon(outline, mixed(color, 0.09))
            canvas.text((outline[:, 0].mean(), outline[1, 1] + 10), name, 11, "mm", SOFT)
        for value, text in chart.y_ticks():
            (x, y), end = ends = self._placed([(0, chart.y.place(value)), (1, chart.y.place(value))])
            canvas.line(ends, GRID, 1)
            base, _, power = (text[:MAX_NAME], "", "") if chart.lanes else text.partition("^")
            canvas.text((x - 8, y - 4), power, 8, "rm", SOFT)
            canvas.text((x - 8 - text_length(power, 8), y), base, 10 if chart.lanes else 12, "rm", SOFT)
        for value, text in chart.x.ticks():
            x, y = self._placed([chart.x.place(value), 0])
            canvas.text((x, y + 14), text, 12, "mm", SOFT)
        for value, _ in chart.marks:
            canvas.line(self._placed([(chart.x.place(value), k) for k in (0, 1)]), mixed(6, 1.0), 1, (3, 3))

    def _lines(self) -> None:
        for line in self._chart.present:
            is_marked = line.drawn_as in ("line", "mean") and line.x.size < MARKED
            for each in [line, replace(line, style="dots")] if is_marked else [line]:
                for shape in self._chart.shapes(each):
                    self._stroke(each, self._placed(shape))

    def _stroke(self, line: Line, shape: FloatArray) -> None:
        """One stroke, dot or outline of the line."""
        color = mixed(line.color, OPACITIES.get(line.style, line.opacity))
        if line.style in FILLED:
            self._canvas.polygon(shape, color)
        elif line.style == "cross" or len(shape) == 1:
            self._canvas.dot(shape[0], 3, BAD if line.style == "cross" else color)
        else:
            dashes = dashes_of()[line.color] if line.style in DASHED else ()
            self._canvas.line(shape, color, WIDTHS.get(line.style, 1.6), dashes)

    def _legend(self) -> list[tuple[Line, float, int]]:
        """The lines that are named, each with its x and its row."""
        keys, x, row = [], self._left, 0
        for line in self._chart.legend:
            width = KEY + 6 + text_length(line.name[:MAX_NAME], 12)
            if x > self._left and x + width > self._right:
                x, row = self._left, row + 1
            keys.append((line, x, row))
            x += width + BETWEEN
        return keys

    def _key(self, line: Line, x: float, y: float) -> None:
        """A name with a piece of the line before it."""
        shape = [(x + KEY / 2, y)]
        if line.style in FILLED:
            shape = [(x + 8, y - 5), (x + 8, y + 5), (x + KEY, y + 5), (x + KEY, y - 5)]
        elif line.style in (*DASHED, "lane"):
            shape = [(x, y), (x + KEY, y)]
        self._stroke(line, np.array(shape))
        self._canvas.text((x + KEY + 6, y), line.name[:MAX_NAME], 12, "lm", INK)


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

    def line(self, points: FloatArray, color: str, width: float, dashes: Sequence[float] = ()) -> None:
        for part in _dashed(points, dashes) if dashes else [points]:
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


def _dashed(points: FloatArray, dashes: Sequence[float]) -> Iterator[FloatArray]:
    """The line cut into strokes; `dashes` are the lengths of strokes and gaps in turn."""
    at = np.concatenate([[0.0], np.hypot(*np.diff(points, axis=0).T).cumsum()])  # length up to each point
    cuts = np.concatenate([[0.0], np.tile(dashes, int(at[-1] / sum(dashes)) + 1).cumsum()])
    for begin, end in zip(cuts[::2], cuts[1::2], strict=False):
        stops = np.unique(np.clip([begin, end, *at], begin, end))
        yield np.stack([np.interp(stops, at, points[:, k]) for k in (0, 1)], axis=1)


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
def dashes_of() -> list[tuple[float, ...]]:
    """The strokes and gaps of each colour's lines; none for a solid one."""
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
