"""The charts of the GPUs: one for each quantity of the `gpu` events, with a line for each device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from launcher.report.charts.chart import Chart, Line, axis_of, steps_axis
from launcher.report.run import Run

FIRST = ("util", "memory", "power", "temperature", "throttl", "energy")
UNITS = {
    "percent": "%",
    "w": "W",
    "c": "°C",
    "bytes": "bytes",
    "j": "J",
    "s": "s",
}
MAX_CHARTS = 12  # the first in the order of FIRST: the others say little of a training


def gpu_charts(run: Run) -> Iterator[Chart]:
    """The charts; none without `gpu` events."""
    devices = run.history.gpus
    fields = sorted({field for curves in devices.values() for field in curves}, key=_order)
    x = steps_axis(max((float(c.points()[0][-1]) for d in devices.values() for c in d.values()), default=1.0))
    for field in fields[:MAX_CHARTS]:
        lines = [
            Line(name, number % 8, *curves[field].points(200))
            for number, (name, curves) in enumerate(devices.items())
            if field in curves
        ]
        title, unit = title_and_unit(field)
        y = axis_of(np.concatenate([line.y for line in lines]), base=1, from_zero=True)
        yield Chart(title, unit, lines, x, y)


def title_and_unit(field: str) -> tuple[str, str]:
    """power_w -> Power, W."""
    ending = max((name for name in UNITS if field.endswith(f"_{name}")), key=len, default="")
    title = field.removesuffix(f"_{ending}").replace("_", " ")
    return title[:1].upper() + title[1:], UNITS.get(ending, "")


def _order(field: str) -> tuple[int, str]:
    return next((k for k, word in enumerate(FIRST) if word in field), len(FIRST)), field
