"""Charts as SVG."""

import re

import numpy as np
import pytest

from launcher.report.charts.chart import Axis, Chart, Line, axis_of
from launcher.report.charts.svg import markup
from launcher.report.html import ASSETS
from launcher.report.run_groups import NUM_COLORS


@pytest.mark.parametrize("style", ["line", "mean", "steps", "dots"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_single_point_is_a_dot(style, number):
    values = np.arange(1.0, 1.0 + number)
    chart = Chart("Loss", "", [Line("a", 0, values, values, style)], Axis(0, 3), Axis(0, 3))
    (drawn,) = re.findall(r'class="s (\w+)"', markup(chart))
    assert drawn == ("dots" if number == 1 else style)


X = np.arange(3.0)


@pytest.mark.parametrize("style", ["line", "mean", "steps"])
def test_lines_differ_in_their_dashes_too_and_the_legend_shows_the_same(style):
    lines = [Line(f"run {number}", number, X, X + number, style) for number in range(NUM_COLORS)]
    text = markup(Chart("Loss", "", lines, Axis(0, 3), Axis(0, 12)))
    looks = re.findall(rf'class="s {style}" style="([^"]+)"', text)
    in_legend, drawn = looks[:NUM_COLORS], looks[NUM_COLORS:]
    assert in_legend == drawn
    variables = [re.search(r"--d:var\((--d\d)\)", look)[1] for look in drawn]
    css = (ASSETS / "page.css").read_text()
    dashes = [re.search(rf"{variable}: ([^;]+);", css)[1] for variable in variables]
    assert len(set(dashes)) == NUM_COLORS
    (rule,) = [line for line in css.splitlines() if "stroke-dasharray: var(--d)" in line]
    assert f".s.{style}" in rule


def test_values_whose_span_is_infinite_have_an_axis() -> None:
    axis = axis_of(np.array([-1e308, 1e308]))
    assert np.isfinite([axis.low, axis.high]).all()


def test_a_small_value_that_never_changes_is_on_its_axis() -> None:
    axis = axis_of(np.array([0.001, 0.001]), base=1)
    assert 0 < axis.low < 0.001 < axis.high < 0.0012


@pytest.mark.parametrize(
    "axis",
    [
        Axis(-1_234_567, -1_234_560),
        Axis(1234.5671, 1234.5679),
        Axis(0.1, 0.4),
        Axis(-3e-8, 2e-8),
        Axis(1e15, 9e15),
    ],
    ids=str,
)
def test_ticks_differ_in_few_digits(axis):
    texts = [text for _, text in axis.ticks()]
    assert len(set(texts)) == len(texts) > 1
    assert max(map(len, texts)) <= 12
