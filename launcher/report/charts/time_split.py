"""Where the time of a step goes: its parts on top of each other over the steps, the averages, the verdict."""

from __future__ import annotations

import numpy as np

from launcher.report.charts.chart import stacked, steps_axis
from launcher.report.charts.svg import markup
from launcher.report.html import paragraph, table
from launcher.report.run import Run
from launcher.telemetry.formatting import percent
from launcher.telemetry.step_time import PARTS, TITLES


def time_split(run: Run) -> str:
    """The markup; "" where no step has its parts."""
    shares = run.history.time_shares
    if shares is None:
        return ""
    times_ms = {TITLES[part]: shares.parts_ms[part] for part in PARTS} | {"everything else": shares.other_ms}
    rows = [
        {"part": title, "ms per step": f"{ms:.2f}", "share": percent(ms / shares.step_ms, 1)}
        for title, ms in times_ms.items()
    ]
    rows.append({"part": "whole step", "ms per step": f"{shares.step_ms:.2f}", "share": ""})
    return paragraph(shares.verdict) + _areas(run) + table("Time of a step by part", rows)


def _areas(run: Run) -> str:
    points = [run.history.parts_ms[part].means() for part in PARTS]
    x = points[0][0]
    if x.size < 2:
        return ""
    layers = [(TITLES[part], y) for part, (_, y) in zip(PARTS, points, strict=True)]
    if not np.isfinite([y for _, y in layers]).all():
        return ""
    return markup(stacked("Time of a step", "ms", x, layers, steps_axis(float(x[-1]))))
