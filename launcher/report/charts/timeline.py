"""A run over the hours: its processes, checkpoints, skipped steps, restarts, warnings, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from launcher.report.charts.chart import Axis, Chart, Line
from launcher.report.charts.svg import markup
from launcher.report.curve import Curve, FloatArray
from launcher.report.html import table
from launcher.report.run_record import RunRecord
from launcher.telemetry.events import (
    EndEvent,
    EvalEvent,
    Event,
    RestartEvent,
    StragglerEvent,
    WarningEvent,
)
from launcher.telemetry.formatting import duration

UNITS = (
    (172_800.0, "days", 86_400.0),
    (7200.0, "hours", 3600.0),
    (120.0, "minutes", 60.0),
    (0.0, "seconds", 1.0),
)
LONGEST_S = 1e9  # of a run; a longer one has damaged times
MAX_FAULTS = 50  # rows of the table


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
    rows: list[tuple[str, FloatArray, FloatArray, int, str]] = [("running", ran, steps, 0, "lane")]
    rows += [
        (name, *points, color, "dots")
        for name, points, color in (
            ("evaluation", _times(run.recording.of(EvalEvent).all()), 2),
            ("checkpoint", run.recording.checkpoint_times.points(200), 5),
            ("skipped", run.recording.skip_times.points(200), 1),
            ("warning", _times(run.recording.of(WarningEvent).all()), 4),
            ("straggler", _times(run.recording.of(StragglerEvent).all()), 3),
            ("restart", _times(run.recording.of(RestartEvent).all()), 6),
            ("failed", _times(_ends(run)), 1),
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
    events: list[RestartEvent | EndEvent] = [*run.recording.of(RestartEvent).all(), *_ends(run)]
    rows = [
        {"after": duration(event.time - began), "step": f"{event.step:,}", "what": _what(event)}
        for event in events
        if math.isfinite(event.time)
    ]
    return table("Restarts and failures", rows[:MAX_FAULTS], texts=("what",))


def _what(event: RestartEvent | EndEvent) -> str:
    if isinstance(event, RestartEvent):
        return f"resumed from {event.path} (attempt {event.attempt})"
    return f"{event.state}: {event.error or ''}"


def _ends(run: RunRecord) -> list[EndEvent]:
    return [event for event in run.recording.of(EndEvent).all() if event.state != "done"]


def _times(events: Sequence[Event]) -> tuple[FloatArray, FloatArray]:
    """The times and the steps of these events."""
    curve = Curve()
    for event in events:
        if math.isfinite(event.time):
            curve.add_point(event.time, float(event.step))
    return curve.points(200)
