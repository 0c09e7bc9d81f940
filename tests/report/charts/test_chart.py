"""Charts as SVG."""

import re

import numpy as np
import pytest

from launcher.report.charts.axis import Axis
from launcher.report.charts.chart import Chart, Line


@pytest.mark.parametrize("style", ["line", "mean", "steps", "dots"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_single_point_is_a_dot(style, number):
    values = np.arange(1.0, 1.0 + number)
    chart = Chart("Loss", "", [Line("a", 0, values, values, style)], Axis(0, 3), Axis(0, 3))
    (drawn,) = re.findall(r'class="s (\w+)"', chart.markup())
    assert drawn == ("dots" if number == 1 else style)
