"""Where the time of a step goes: its parts over the steps, the averages, the verdict."""

from __future__ import annotations

import numpy as np

from launcher.report.charts.chart import Chart, Line, axis_of, steps_axis
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
    return paragraph(shares.verdict) + _lines(run) + table("Time of a step by part", rows)


def _lines(run: Run) -> str:
    lines = [
        Line(TITLES[part], color, *run.history.parts_ms[part].means()) for color, part in enumerate(PARTS)
    ]
    x, values = lines[0].x, np.concatenate([line.y for line in lines])
    if x.size < 2:
        return ""
    axis = axis_of(values, base=1, from_zero=True)
    return markup(Chart("Time of a step", "ms", lines, steps_axis(float(x[-1])), axis))
