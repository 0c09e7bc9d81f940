"""Charts as PNG files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launcher.report.charts.chart import Axis, Chart, Line
from launcher.report.charts.picture import HEIGHT, WIDTH, rgb, write_picture

X = np.arange(2.0, 8.0)
AXIS = Axis(0, 10)


def colors_of(path: Path) -> set[tuple[int, int, int]]:
    with Image.open(path) as image:
        return {color for _, color in image.convert("RGB").getcolors(1 << 20)}


def drawn(directory: Path, *lines: Line, note: str = "") -> Path:
    return write_picture([Chart("Title", "", lines, AXIS, AXIS, note=note)], directory / "picture.png")


@pytest.mark.parametrize("style", ["line", "mean", "steps", "dots", "area", "bars", "lane"])
def test_each_style_is_drawn_in_its_colour(tmp_path, style):
    found = colors_of(drawn(tmp_path, Line("name", 2, X, X, style, opacity=1.0)))
    assert rgb(2) in found
    assert not {rgb(0), rgb(1)} & found


def test_a_chart_without_a_point_says_that_nothing_was_recorded(tmp_path):
    empty = drawn(tmp_path, Line("name", 0, X[:0], X[:0])).read_bytes()
    outside = drawn(tmp_path, Line("name", 0, X[:2], X[:2] * 0 - 99)).read_bytes()
    assert len(empty) > len(outside) + 500, "the words"


@pytest.mark.parametrize(("number", "size"), [(1, (WIDTH, HEIGHT)), (3, (2 * WIDTH, 2 * HEIGHT))])
def test_charts_stand_in_rows_of_two(tmp_path, number, size):
    charts = [Chart(str(k), "", [Line("name", k, X, X)], AXIS, AXIS) for k in range(number)]
    path = write_picture(charts, tmp_path / "picture.png")
    with Image.open(path) as image:
        assert image.size == size
    assert colors_of(path) >= {rgb(k) for k in range(number)}


def test_long_names_are_cut_and_many_take_more_rows(tmp_path):
    lines = [Line(f"{k} {'name ' * 40}", k, X, X + k) for k in range(8)]
    assert colors_of(drawn(tmp_path, *lines)) >= {rgb(k) for k in range(8)}
