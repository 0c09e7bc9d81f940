"""A run over the hours: its processes, checkpoints, skipped steps, restarts, warnings, and how it ended."""

from __future__ import annotations

import math

import numpy as np

from launcher.report.charts.chart import Axis, Chart, Line
from launcher.report.charts.svg import markup
from launcher.report.curve import FloatArray
from launcher.report.html import table
from launcher.report.run_record import RunRecord
from launcher.telemetry import events
from launcher.telemetry.formatting import duration

UNITS = (
    (172_800.0, "days", 86_400.0),
    (7200.0, "hours", 3600.0),
    (120.0, "minutes", 60.0),
    (0.0, "seconds", 1.0),
)
LONGEST_S = 1e9  # of a run; a longer one has damaged times
MAX_FAULTS = 50  # rows of the table
DOTS: tuple[tuple[str, type[events.Event], int], ...] = (  # lane, what it has, colour
    ("evaluation", events.EvalEvent, 2),
    ("checkpoint", events.CheckpointEvent, 5),
    ("skipped", events.OverflowEvent, 1),
    ("warning", events.WarningEvent, 4),
    ("straggler", events.StragglerEvent, 3),
    ("restart", events.RestartEvent, 6),
)


def timeline(run: RunRecord) -> str:
    """The markup; "" for a run without times."""
    attempts = [a for a in run.recording.attempts if math.isfinite(a.began) and math.isfinite(a.ended)]
    if not attempts:
        return ""
    began = min(a.began for a in attempts)
    length = max(a.ended for a in attempts) - began
    if not 0 < length < LONGEST_S:
        return ""
    unit, size = next((name, size) for least, name, size in UNITS if length >= least)
    ran = np.array([(a.began, a.ended) for a in attempts]).reshape(-1)
    steps = np.array([(a.first_step, a.last_step) for a in attempts], float).reshape(-1)
    failed = np.array([(end.time, end.step) for end in _ends(run)], float).reshape(-1, 2)
    rows: list[tuple[str, FloatArray, FloatArray, int, str]] = [("running", ran, steps, 0, "lane")]
    rows += [
        (name, *points, color, "dots")
        for name, points, color in (
            *((name, run.recording.of(kind).times.points(200), color) for name, kind, color in DOTS),
            ("failed", (failed[:, 0], failed[:, 1]), 1),
        )
        if points[0].size
    ]
    lanes = [name for name, *_ in reversed(rows)]
    lines = [
        Line(name, color, (x - began) / size, np.full(x.size, float(lanes.index(name))), style, values=steps)
        for name, x, steps, color, style in rows
    ]
    chart = Chart(
        "What happened when",
        f"{unit} since the start",
        lines,
        Axis(0.0, length / size),
        Axis(-0.6, len(lanes) - 0.4),
        f"{unit} since the start",
        lanes=lanes,
        has_legend=False,
    )
    return markup(chart) + _faults(run, began)


def _faults(run: RunRecord, began: float) -> str:
    """Restarts and the end of a run that was not undisturbed, each with its reason."""
    restarts = run.recording.of(events.RestartEvent).all()
    faults: list[tuple[events.Event, str]] = [
        *((each, f"resumed from {each.path} (attempt {each.attempt})") for each in restarts),
        *((end, f"{end.state}: {end.error or ''}") for end in _ends(run)),
    ]
    rows = [
        {"after": duration(event.time - began), "step": f"{event.step:,}", "what": what}
        for event, what in faults
        if math.isfinite(event.time)
    ]
    return table("Restarts and failures", rows[:MAX_FAULTS], texts=("what",))


def _ends(run: RunRecord) -> list[events.EndEvent]:
    """The ends of processes that were not done."""
    ends = run.recording.of(events.EndEvent).all()
    return [end for end in ends if end.state != "done" and math.isfinite(end.time)]
