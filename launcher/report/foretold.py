"""What `plan` foretold of a run beside what was measured, as a table of a page.

Owns which numbers correspond, and the warning where the run has other settings than the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeGuard

from launcher.errors import counted, listed
from launcher.report.html import paragraph, table
from launcher.report.run_record import RunRecord
from launcher.run_dir.result import Forecast
from launcher.telemetry.events import CheckpointEvent
from launcher.telemetry.formatting import number, size

Row = tuple[str, float | None, float | None, Callable[[float], str]]  # name, foretold, measured, as text
NO_PART = ("run.", "launch.", "tracker.", "sweep.", "recipes.")  # of what is foretold
MOST_KEYS = 5


def foretold(run: RunRecord) -> str:
    """The markup; "" for a run without a plan.json."""
    if (forecast := run.forecast) is None:
        return ""
    rows = [
        {
            "": name,
            "foretold": text(of_plan),
            "measured": text(of_run) if _known(of_run) else "-",
            "measured / foretold": f"{of_run / of_plan:.2f}" if _known(of_run) else "-",
        }
        for name, of_plan, of_run, text in _pairs(run, forecast)
        if _known(of_plan)
    ]
    return table("Foretold by plan", rows, texts=("",)) + paragraph(_other_settings(run, forecast), "note")


def _known(value: float | None) -> TypeGuard[float]:
    """Whether a file has it: damaged ones have 0 or NaN instead."""
    return value is not None and math.isfinite(value) and value > 0


def _other_settings(run: RunRecord, forecast: Forecast) -> str:
    ranks, of_run = forecast.world_size, run.result.world_size
    differ = [
        f"{key}={foretold} (in the run {run.config[key]})"
        for key, foretold in forecast.config.items()
        if not key.startswith(NO_PART) and run.config.get(key, foretold) != foretold
    ]
    if ranks and of_run not in (None, ranks):
        differ.insert(0, f"{counted(ranks, 'rank')} (in the run {of_run})")
    return f"The plan was for other settings: {listed(differ, MOST_KEYS)}." if differ else ""


def _pairs(run: RunRecord, forecast: Forecast) -> Iterator[Row]:
    result, saved = run.result, run.recording.of(CheckpointEvent).last
    step_ms = None if result.step_time is None else result.step_time.step_ms
    yield "steps", forecast.steps, result.steps, number
    yield "parameters", forecast.parameters, result.parameters, number
    yield "time per step", forecast.step_ms, step_ms, "{:.1f} ms".format
    yield "sent by a rank per step", forecast.wire_bytes_per_step, result.wire_bytes_per_step, size
    yield "weights, masters, gradients, states", forecast.state_bytes, result.state_bytes, size
    if result.peak_memory_bytes:  # of a GPU: a CPU's has what all of the process takes
        yield "peak of memory", forecast.memory_bytes, result.peak_memory_bytes, size
    yield "checkpoint", forecast.checkpoint_bytes, None if saved is None else saved.size_bytes, size
