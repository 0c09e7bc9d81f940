"""The latest gradients over the range of fp16, with and without the loss scale.

Elements that are zero as sent were rounded to zero or are always zero (dead units, kernel positions that only
see padding). The additional zeros at a scale of 1 are those that the scale prevents.
"""

from __future__ import annotations

import math

import numpy as np

from launcher.report.charts.chart import Axis, Chart, Line
from launcher.report.charts.svg import markup
from launcher.report.html import paragraph
from launcher.report.run import Run
from launcher.telemetry.events import GradientsEvent
from launcher.telemetry.formatting import percent

SMALLEST_SUBNORMAL, SMALLEST_NORMAL, END = -24, -14, 16  # exponents of fp16; END is the first that overflows
VISIBLE_PERCENT = 0.005  # smaller shares are shown as 0.00 %
AS_SENT, AT_SCALE_1 = 0, 7  # colours
PALE = 0.3  # opacity of the bars behind the others


def _elements(event: GradientsEvent) -> int:
    return max(1, sum(event.histogram) + event.zeros)


def _shift(event: GradientsEvent) -> int:
    """The number of octaves by which the loss scale moves the gradients."""
    return round(math.log2(event.scale))


def gradient_part(run: Run) -> str:
    """The markup; "" without gradients."""
    found = run.history.last(GradientsEvent)
    if found is None or not 0 < found.scale < math.inf:
        return ""
    text = (
        f"Step {found.step:,}, {_elements(found):,} elements, loss scale 2^{_shift(found)}: "
        f"{percent(found.zero_share, 2)} are zero as sent; at scale 1 it would be "
        f"{percent(found.zero_share_at_scale_1, 2)}."
    )
    return paragraph(text) + markup(histogram(found))


def histogram(found: GradientsEvent) -> Chart:
    """Exponents as sent and at scale 1: the scale shifts them by its logarithm."""
    shift, heights = _shift(found), 100 * np.array(found.histogram, float) / _elements(found)
    highest = max(heights.max(initial=0.0), 0.01)
    (visible,) = np.nonzero(heights > VISIBLE_PERCENT)
    exponents, heights = found.first_exponent + visible.astype(float), heights[visible]
    sent = f"as sent, at scale 2^{shift}: {percent(found.zero_share, 2)} are zero"
    lines = [Line(sent, AS_SENT, exponents, heights, "bars", opacity=1.0)]
    if shift:
        lost = percent(found.zero_share_at_scale_1 - found.zero_share, 2)
        lost = f"at scale 1: another {lost} would be zero"
        lines.insert(0, Line(lost, AT_SCALE_1, exponents - shift, heights, "bars", opacity=PALE))
    low = min([SMALLEST_SUBNORMAL - 3, *(float(line.x.min()) for line in lines if line.x.size)]) - 2
    return Chart(
        "Size of the gradient elements",
        "% of the elements",
        lines,
        Axis(low, END + 4),
        Axis(0.0, 1.15 * highest),
        "power of two",
        zones=(
            (low, SMALLEST_SUBNORMAL - 1, "zero", 1),
            (SMALLEST_SUBNORMAL - 1, SMALLEST_NORMAL, "subnormal", 4),
            (SMALLEST_NORMAL, END, "normal", 2),
            (END, END + 4, "inf", 1),
        ),
    )
