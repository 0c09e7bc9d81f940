"""The charts of the GPUs: one for each quantity of the `gpu` events, with a line for each device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from launcher.report.charts.chart import Chart, Line, axis_of, steps_axis
from launcher.report.run import Run
from launcher.report.run_groups import NUM_COLORS

# What is drawn, by field: title, unit.
QUANTITIES = {
    "utilisation_percent": ("Utilisation", "%"),
    "memory_bytes": ("Memory", "bytes"),
    "power_w": ("Power", "W"),
    "temperature_c": ("Temperature", "°C"),
    "throttled_s": ("Throttled", "s"),
    "energy_j": ("Energy", "J"),
}


def gpu_charts(run: Run) -> Iterator[Chart]:
    """The charts; none without `gpu` events."""
    devices = run.history.gpus
    x = steps_axis(max((float(c.points()[0][-1]) for d in devices.values() for c in d.values()), default=1.0))
    for field, (title, unit) in QUANTITIES.items():
        lines = [
            Line(name, number % NUM_COLORS, *curves[field].points(200))
            for number, (name, curves) in enumerate(devices.items())
            if field in curves
        ]
        if lines:
            y = axis_of(np.concatenate([line.y for line in lines]), base=1, from_zero=True)
            yield Chart(title, unit, lines, x, y)
