"""The latest gradients over the range of fp16, with and without the loss scale, and zeros by parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from launcher.report.charts.axis import Axis
from launcher.report.charts.chart import HEIGHT, WIDTH, Chart, Line
from launcher.report.html import folded, paragraph, table
from launcher.report.run_record import RunRecord

SMALLEST_SUBNORMAL, SMALLEST_NORMAL, END = -24, -14, 16  # exponents of fp16; END is the first that overflows
VISIBLE_PERCENT = 0.005
MAX_LAYERS = 24
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
    def of(cls, event: dict[str, Any]) -> _Gradients | None:
        """None where the event is not of this form."""
        try:
            counts = [int(count) for count in event["histogram"]]
            elements = max(1, sum(counts) + int(event["zeros"]))
            return cls(
                event["step"],
                round(math.log2(event["scale"])),
                [int(event["first_exponent"]) + k for k in range(len(counts))],
                [100 * count / elements for count in counts],
                elements,
                float(event["zero_share"]),
                float(event["zero_share_at_scale_1"]),
                [
                    (str(name), float(of["zero_share_at_scale_1"]), float(of["zero_share"]))
                    for name, of in event["layers"].items()
                ],
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None


def gradient_part(run: RunRecord) -> str:
    """The markup; "" without gradients."""
    event = run.recording.gradients
    found = None if event is None else _Gradients.of(event)
    if found is None:
        return ""
    text = (
        f"Step {found.step:,}, {found.elements:,} elements, loss scale 2^{found.shift}: "
        f"{_percent(found.zero_share)} are zero as sent; at scale 1 it would be "
        f"{_percent(found.zero_share_at_scale_1)}."
    )
    return paragraph(text) + _histogram(found) + _layers(found)


def _histogram(found: _Gradients) -> str:
    visible = [e for e, part in zip(found.exponents, found.percent, strict=True) if part > VISIBLE_PERCENT]
    low = min([*visible, *(e - found.shift for e in visible), SMALLEST_SUBNORMAL - 3]) - 2
    x = Axis(low, END + 4)
    y = Axis(0.0, 1.15 * max([*found.percent, 0.01]))
    sent = [
        (e, part) for e, part in zip(found.exponents, found.percent, strict=True) if part > VISIBLE_PERCENT
    ]
    series = [(f"as sent, at scale 2^{found.shift}", sent, AS_SENT, 1.0)]
    if found.shift:
        series.insert(0, ("at scale 1", [(e - found.shift, p) for e, p in sent], AT_SCALE_1, PALE))
    lines = [
        Line(
            name,
            color,
            np.array([e for e, _ in bars], float),
            np.array([p for _, p in bars], float),
            "area",
            opacity=opacity,
        )
        for name, bars, color, opacity in series
    ]
    drawing = "".join(_bars(line, x, y) for line in lines)
    zones = (
        (low, SMALLEST_SUBNORMAL - 1, "zero", 1),
        (SMALLEST_SUBNORMAL - 1, SMALLEST_NORMAL, "subnormal", 4),
        (SMALLEST_NORMAL, END, "normal", 2),
        (END, END + 4, "inf", 1),
    )
    return Chart(
        "Size of the gradient elements",
        "% of the elements",
        lines,
        x,
        y,
        "power of two",
        drawing=drawing,
        zones=zones,
    ).markup()


def _bars(line: Line, x: Axis, y: Axis) -> str:
    bars = list(zip(line.x.astype(int).tolist(), line.y.tolist(), strict=True))
    path = "".join(
        f"M{x.place(e) * WIDTH:.1f} {HEIGHT}V{(1 - y.place(part)) * HEIGHT:.1f}"
        f"H{x.place(e + 0.86) * WIDTH:.1f}V{HEIGHT}Z"
        for e, part in bars
    )
    values = f'data-x="{" ".join(str(e) for e, _ in bars)}" data-y="{" ".join(f"{p:.4g}%" for _, p in bars)}"'
    return f'<path class="bar" style="{line.look}" d="{path}" data-name="{escape(line.name)}" {values}/>'


def _layers(found: _Gradients) -> str:
    worst = sorted(found.layers, key=lambda layer: -layer[1])[:MAX_LAYERS]
    rows = [
        {"parameter": name, "zero at scale 1": _percent(lost), "zero as sent": _percent(zero)}
        for name, lost, zero in worst
    ]
    title = f"Zeros by parameter ({len(worst)} of {len(found.layers)}, the worst first)"
    return folded(title, table("Zeros by parameter", rows, texts=("parameter",)))


def _percent(share: float) -> str:
    return f"{share:.2%}".replace("%", " %")
