"""`report.html`: one run, or several laid over each other, on one self-contained page.

Owns the parts of the page and their order; other modules own their markup. Reads only the files of the runs,
accepts missing ones, and escapes their content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import listed
from launcher.report.after_evaluation import after_evaluation
from launcher.report.charts.confusion_table import confusion_part
from launcher.report.charts.gpu_charts import gpu_charts
from launcher.report.charts.gradient_chart import gradient_part
from launcher.report.charts.run_charts import charts_of, restart_note
from launcher.report.charts.time_split import time_split
from launcher.report.charts.timeline import timeline
from launcher.report.html import (
    cells,
    facts,
    failure,
    folded,
    grid,
    listing,
    page,
    paragraph,
    preformatted,
    section,
    subsection,
    table,
    tiles,
)
from launcher.report.reading import Warn, silent
from launcher.report.run_record import RunRecord
from launcher.report.settings import difference_rows, run_settings, setting_rows
from launcher.run_dir.atomic import write_text
from launcher.run_dir.records import REPORT
from launcher.telemetry.events import FILE_NAME
from launcher.telemetry.formatting import duration, evaluation_cells, metric, metric_title, number

MAX_OVERFLOWS = 40  # rows; for more, the chart is enough
MAX_PARAMETERS = 4  # names in a row of the overflow table
MAX_DETAILED = 6  # runs of which a page shows more than curves and a row of the table
TILES = ("metrics", "sets", "classes", "confusion_matrix", "metric", "metric_name", "state", "exit", "error")
Part = Callable[[RunRecord], str]


def write_report(run_dir: Path, warn: Warn = silent) -> Path:
    """Write report.html from the other files, during or after a run. Raises OSError."""
    path = run_dir / REPORT
    write_text(path, render([RunRecord.read(run_dir, warn)]))
    return path


def write_sweep_report(sweep_dir: Path, run_dirs: Sequence[Path]) -> Path:
    """Write report.html of the runs of a sweep to its directory. Raises OSError."""
    path = sweep_dir / REPORT
    write_text(path, render([RunRecord.read(run_dir) for run_dir in run_dirs], sweep_dir.name))
    return path


def render(runs: Sequence[RunRecord], title: str = "") -> str:
    """The whole page."""
    settings = run_settings(runs)
    alone = runs[0] if len(runs) == 1 else None
    parts = [
        _headline(alone) if alone else table("Runs", [row_of(run) for run in runs], texts=("run",)),
        *(failure(_failure_title(run, alone is None), run.error or run.note) for run in runs),
        section("Over the seeds", table("Over the seeds", setting_rows(settings), texts=("setting",))),
        section("Curves", paragraph(restart_note(settings), "note") + grid(charts_of(settings))),
        _each("Where the time goes", runs, time_split),
        _each("Gradients in the range of fp16", runs, gradient_part),
        _each("GPUs", runs, lambda run: grid(gpu_charts(run))),
        _each("Mistakes by class", runs, confusion_part),
        _each("Time line", runs, timeline),
        section(
            "Config differences",
            table("Config differences", difference_rows(runs), texts=("run",)) if not alone else "",
        ),
        _each("Evaluations", runs, _evaluations),
        _each("Shown by the recipe", runs, after_evaluation),
        _each("Skipped steps", runs, _overflows),
        _each("Ranks that the others waited for", runs, _stragglers),
        _each("Warnings", runs, _warnings),
        _each("Details", runs, _details),
    ]
    left_out = len(runs) - MAX_DETAILED
    note = (
        f"Details of the first {MAX_DETAILED} runs only; {left_out} more have pages of their own."
        if left_out > 0
        else ""
    )
    return page(title or runs[0].name, _subtitle(runs), "".join(parts) + listing([note] if note else []))


def row_of(run: RunRecord) -> dict[str, str]:
    """The run in one row of a table."""
    name = run.metric_name
    return {
        "run": run.name,
        "state": state_text(run),
        "steps": _steps(run),
        "loss": number(run.recording.steps["loss"].last),
        run.metric_label if name and name != "loss" else "loss, held out": metric(name or "loss", run.metric),
        "time": duration(run.seconds),
        "samples / s": number(run.samples_per_s and round(run.samples_per_s)),
        "skipped": number(run.skipped),
        "bound by": run.bound or "-",
    }


def state_text(run: RunRecord) -> str:
    """The state, or for how long a run that should be going has been silent."""
    silent_s = run.life.silent_s
    return f"no sign of life for {duration(silent_s)}" if silent_s else run.state


def _steps(run: RunRecord) -> str:
    total = run.total_steps
    return number(run.steps) if total in (None, run.steps) else f"{run.steps:,} of {total:,}"


def _each(title: str, runs: Sequence[RunRecord], part: Part) -> str:
    """A section with this part of each run."""
    several = len(runs) > 1
    bodies = [subsection(run.name if several else "", part(run)) for run in runs[:MAX_DETAILED]]
    return section(title, cells(bodies) if several else bodies[0])


def _subtitle(runs: Sequence[RunRecord]) -> str:
    made = f"Report of {time.strftime('%Y-%m-%d %H:%M')}"
    if len(runs) > 1:
        return f"{len(runs)} runs. {made}."
    environment = runs[0].environment
    packages = environment.get("packages")
    torch = packages.get("torch") if isinstance(packages, dict) else None
    devices = environment.get("devices")
    known = [
        str(runs[0].directory.absolute()),
        listed(sorted(set(map(str, devices))), 2) if isinstance(devices, list) else "",
        f"torch {torch}" if torch else "",
        made,
    ]
    return " · ".join(text for text in known if text)


def _headline(run: RunRecord) -> str:
    """The most important numbers."""
    cells = {"state": state_text(run)}
    if run.metric is not None and run.metric_name is not None:
        cells[run.metric_label] = metric(run.metric_name, run.metric)
    if run.seconds is not None:
        cells["training time"] = duration(run.seconds)
    if run.samples_per_s is not None:
        cells["samples / s"] = number(round(run.samples_per_s))
    if run.steps:
        cells["steps"] = _steps(run)
    if run.skipped is not None:
        cells["skipped"] = number(run.skipped)
    return tiles(cells)


def _failure_title(run: RunRecord, with_name: bool) -> str:
    code = run.life.ending.get("exit")
    name = f"{run.name}: " if with_name else ""
    return f"{name}{state_text(run)}" + (f", exit {code}" if isinstance(code, int) else "")


def _evaluations(run: RunRecord) -> str:
    records = run.recording.of("eval")
    shown = records.all()
    left_out = records.count - len(shown)
    return table("Evaluations", [evaluation_cells(record) for record in shown]) + listing(
        [f"{left_out:,} in the middle are left out; they are in {FILE_NAME}"] if left_out else []
    )


def _overflows(run: RunRecord) -> str:
    records = run.recording.of("overflow")
    rows = [
        {
            "step": number(record["step"]),
            "loss scale": number(record.get("scale")),
            "ranks": ", ".join(map(str, _list(record.get("ranks")))),
            "first parameters": listed(_list(record.get("parameters")), MAX_PARAMETERS),
        }
        for record in records.all()[:MAX_OVERFLOWS]
    ]
    left_out = records.count - len(rows)
    more = listing([f"and {left_out:,} more, in {FILE_NAME}"] if left_out else [])
    return table("Skipped steps", rows, texts=("first parameters",)) + more


def _stragglers(run: RunRecord) -> str:
    rows = [
        {
            "steps": f"{number(one.get('first_step'))} to {number(one.get('last_step'))}",
            "rank": number(one.get("rank")),
            "late by, ms": number(one.get("late_ms")),
            "step, ms": number(one.get("step_ms")),
            "slow part": _slow_part(one),
            "host": str(one.get("host")),
        }
        for one in run.recording.of("straggler").all()[:MAX_OVERFLOWS]
    ]
    return table("Ranks that the others waited for", rows, texts=("host",))


def _slow_part(event: Mapping[str, Any]) -> str:
    """data, compute or link; of a link also its other end and its rate."""
    rate = event.get("mbit_per_s")
    to = f" to rank {event.get('receiver')}, {number(rate)} Mbit/s" if rate is not None else ""
    return f"{event.get('cause')}{to}"


def _warnings(run: RunRecord) -> str:
    records = run.recording.of("warning")
    texts = [f"step {one['step']:,}: {one.get('text')}" for one in records.all()]
    left_out = records.count - len(texts)
    return listing([*texts, *([f"and {left_out:,} more, in {FILE_NAME}"] if left_out else [])])


def _details(run: RunRecord) -> str:
    decisions = run.recording.of("decision").all()
    return (
        folded("Decisions", listing(f"{one.get('topic')} {one.get('text')}" for one in decisions))
        + folded("Classification report", preformatted("Classification report", run.classification_report))
        + folded("Result", _result(run))
        + folded("Environment", _environment(run))
        + folded("Config", preformatted("Config", _config(run)))
    )


def _config(run: RunRecord) -> str:
    """config.yaml, with a comment at the model and the data set if the recipe does not use them."""
    used = run.recording.of("start").last or {}
    group, lines = "", []
    for line in run.config_text.splitlines():
        group = group if line.startswith(" ") else line.rstrip(":")
        name = used.get(group) if group in ("model", "data") else None
        if name is not None and line.startswith("  name: ") and line != f"  name: {name}":
            line += f"  # not used: the recipe has its own, {name}"
        lines.append(line)
    return "\n".join(lines)


def _result(run: RunRecord) -> str:
    cells = {key: number(value) for key, value in run.result.items() if key not in TILES}
    metrics = run.result.get("metrics") or {}
    return facts(
        "Result", {**{metric_title(name): metric(name, value) for name, value in metrics.items()}, **cells}
    )


def _environment(run: RunRecord) -> str:
    flat: dict[str, str] = {}
    for key, value in run.environment.items():
        if isinstance(value, dict):
            flat.update({f"{key} {name}": str(item) for name, item in value.items() if item is not None})
        elif value is not None:
            flat[key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return facts("Environment", flat)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
