"""A white picture to draw on with Pillow, in the colours and dashes of the page.

Owns smoothing, fonts and colours. Pillow, imported where a picture is made, takes 0.2 s of CPU time at the
end of a run; matplotlib took 3, of which 0.7 were its import.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from launcher.report.curve import FloatArray
from launcher.report.html import ASSETS

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

SCALE = 3  # pixels drawn for one that is written, which smooths lines and letters
INK, SOFT, GRID, BAD = "#1c2127", "#5b6570", "#e3e6ea", "#b3261e"  # those of the page on white
Place = Sequence[float] | FloatArray  # x and y


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
