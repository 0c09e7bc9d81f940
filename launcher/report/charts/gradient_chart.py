"""The latest gradients over the range of fp16, with and without the loss scale, and zeros by parameter.

Elements that are zero as sent were rounded to zero or are always zero (dead units, kernel positions that only
see padding). The additional zeros at a scale of 1 are those that the scale prevents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from launcher.report.charts.axis import Axis
from launcher.report.charts.chart import Chart, Line
from launcher.report.charts.svg import markup
from launcher.report.html import folded, paragraph, table
from launcher.report.run_record import RunRecord
from launcher.telemetry.events import GradientsEvent

SMALLEST_SUBNORMAL, SMALLEST_NORMAL, END = -24, -14, 16  # exponents of fp16; END is the first that overflows
VISIBLE_PERCENT = 0.005  # smaller shares are shown as 0.00 %
MAX_LAYERS = 24  # lanes of 16 pixels in gradients.png
AS_SENT, AT_SCALE_1 = 0, 7  # colours
PALE = 0.3  # opacity of the bars behind the others


@dataclass(frozen=True)
class _Gradients:
    """What a `gradients` event says, checked."""

    step: int
    shift: int  # log2 of the loss scale
    exponents: list[int]
    percent: list[float]
    elements: int
    zero_share: float
    zero_share_at_scale_1: float
    layers: list[tuple[str, float, float]]  # name, share of zeros at scale 1, and as sent

    @classmethod
    def of(cls, event: GradientsEvent | None) -> _Gradients | None:
        """None where there is no event, or one whose numbers are damaged."""
        if event is None or not 0 < event.scale < math.inf or not math.isfinite(event.zero_share):
            return None
        counts, layers = event.histogram, event.layers.items()
        elements = max(1, sum(counts) + event.zeros)
        return cls(
            event.step,
            round(math.log2(event.scale)),
            [event.first_exponent + k for k in range(len(counts))],
            [100 * count / elements for count in counts],
            elements,
            event.zero_share,
            event.zero_share_at_scale_1,
            [(name, of.zero_share_at_scale_1, of.zero_share) for name, of in layers],
        )


def gradient_part(run: RunRecord) -> str:
    """The markup; "" without gradients."""
    found = _Gradients.of(run.recording.gradients)
    if found is None:
        return ""
    text = (
        f"Step {found.step:,}, {found.elements:,} elements, loss scale 2^{found.shift}: "
        f"{_percent(found.zero_share)} are zero as sent; at scale 1 it would be "
        f"{_percent(found.zero_share_at_scale_1)}."
    )
    return paragraph(text) + markup(_histogram(found)) + _table(found)


def gradient_charts(run: RunRecord) -> list[Chart]:
    """The exponents of the latest gradients, and the zeros of the worst parameters; none without them."""
    found = _Gradients.of(run.recording.gradients)
    return [] if found is None else [_histogram(found), _zeros(found)]


def _histogram(found: _Gradients) -> Chart:
    """Exponents as sent and at scale 1: the scale shifts them by its logarithm."""
    exponents, percent = np.array(found.exponents, float), np.array(found.percent)
    visible = percent > VISIBLE_PERCENT
    exponents, percent = exponents[visible], percent[visible]
    sent = f"as sent, at scale 2^{found.shift}: {_percent(found.zero_share)} are zero"
    lines = [Line(sent, AS_SENT, exponents, percent, "bars", opacity=1.0)]
    if found.shift:
        lost = f"at scale 1: another {_percent(found.zero_share_at_scale_1 - found.zero_share)} would be zero"
        lines.insert(0, Line(lost, AT_SCALE_1, exponents - found.shift, percent, "bars", opacity=PALE))
    low = min([SMALLEST_SUBNORMAL - 3, *(float(line.x.min()) for line in lines if line.x.size)]) - 2
    return Chart(
        "Size of the gradient elements",
        "% of the elements",
        lines,
        Axis(low, END + 4),
        Axis(0.0, 1.15 * max([*found.percent, 0.01])),
        "power of two",
        zones=(
            (low, SMALLEST_SUBNORMAL - 1, "zero", 1),
            (SMALLEST_SUBNORMAL - 1, SMALLEST_NORMAL, "subnormal", 4),
            (SMALLEST_NORMAL, END, "normal", 2),
            (END, END + 4, "inf", 1),
        ),
    )


def _zeros(found: _Gradients) -> Chart:
    """A lane for each of the worst parameters: its zeros at scale 1, and as sent in front of them."""
    worst = worst_layers(found)[::-1]
    places = np.arange(float(len(worst))).repeat(2)

    def bars(name: str, color: int, opacity: float, shares: list[float]) -> Line:
        x = np.stack([np.zeros(len(shares)), 100 * np.array(shares)], axis=1).reshape(-1)
        return Line(name, color, x, places, "lane", opacity=opacity)

    return Chart(
        f"Zeros by parameter, the worst {len(worst)} of {len(found.layers)}",
        "%",
        [
            bars("at scale 1", AT_SCALE_1, PALE, [lost for _, lost, _ in worst]),
            bars("as sent", AS_SENT, 1.0, [zero for _, _, zero in worst]),
        ],
        Axis(0.0, 100.0),
        Axis(-0.6, len(worst) - 0.4),
        "elements that are zero in fp16, %",
        lanes=[name for name, *_ in worst],
    )


def worst_layers(found: _Gradients) -> list[tuple[str, float, float]]:
    """The parameters with the most zeros at scale 1, most first."""
    return sorted(found.layers, key=lambda layer: -layer[1])[:MAX_LAYERS]


def _table(found: _Gradients) -> str:
    worst = worst_layers(found)
    rows = [
        {"parameter": name, "zero at scale 1": _percent(lost), "zero as sent": _percent(zero)}
        for name, lost, zero in worst
    ]
    title = f"Zeros by parameter ({len(worst)} of {len(found.layers)}, the worst first)"
    return folded(title, table("Zeros by parameter", rows, texts=("parameter",)))


def _percent(share: float) -> str:
    return f"{share:.2%}".replace("%", " %")
