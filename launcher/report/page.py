"""`report.html`: one run, or several laid over each other, on one self-contained page.

Owns the parts of the page and their order; other modules own their markup. Reads only the files of the runs,
accepts missing ones, and escapes their content.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from launcher.errors import listed
from launcher.report import html
from launcher.report.charts.chart import Chart
from launcher.report.charts.confusion import confusion_part
from launcher.report.charts.gpu_charts import gpu_charts
from launcher.report.charts.gradient_chart import gradient_part
from launcher.report.charts.run_charts import curves_note, run_charts
from launcher.report.charts.svg import markup
from launcher.report.charts.time_split import time_split
from launcher.report.comparison import only_precision
from launcher.report.overview import MAX_DETAILED, failures, headline, table_of_runs
from launcher.report.precision_comparison import NOTE, QUANTITY, comparison_rows, notes
from launcher.report.reading import MAX_TEXT
from launcher.report.run import Run
from launcher.report.run_groups import RunGroup, grouped
from launcher.run_dir.atomic import write_text
from launcher.run_dir.records import REPORT
from launcher.telemetry import events
from launcher.telemetry.event_log import FILE_NAME
from launcher.telemetry.formatting import duration, evaluation_cells, number

MAX_ROWS = 100  # of a table of events
MAX_PARAMETERS = 4  # names in a row of the overflow table
Part = Callable[[Run], str]


def write_report(run: Run) -> Path:
    """Write the run's report.html, during or after the run. Raises OSError."""
    path = run.directory / REPORT
    write_text(path, render([run]))
    return path


def write_sweep_report(sweep_dir: Path, runs: Sequence[Run]) -> Path:
    """Write report.html of the runs of a sweep to its directory. Raises OSError."""
    path = sweep_dir / REPORT
    write_text(path, render(runs, sweep_dir.name, sweep_dir))
    return path


def render(runs: Sequence[Run], title: str = "", sweep_dir: Path | None = None) -> str:
    """The whole page; of a sweep over precisions with their comparison."""
    groups = grouped(runs)
    curves = html.paragraph(curves_note(groups), "note") + _drawn(run_charts(groups))
    parts = [
        headline(runs[0]) if len(runs) == 1 else table_of_runs(runs, groups),
        failures(runs),
        html.section("Precisions side by side", _precisions(runs, groups)) if sweep_dir else "",
        html.section("Curves", curves),
        _details_of_first(runs),
    ]
    return html.page(title or runs[0].name, _subtitle(runs), "".join(parts))


def _precisions(runs: Sequence[Run], sides: Sequence[RunGroup]) -> str:
    """The comparison of runs that differ only in precision and seed; "" for others."""
    if not only_precision([run.overrides for run in runs]):
        return ""
    table = html.table("Precisions side by side", comparison_rows(sides), texts=(QUANTITY,))
    return table + html.paragraph(NOTE, "note") + html.listing(notes(sides))


def _drawn(charts: Iterable[Chart]) -> str:
    return html.grid(markup(chart) for chart in charts)


def _details_of_first(runs: Sequence[Run]) -> str:
    """What belongs to one run; of the first ones, and folded, where there are many."""
    parts = [
        _each("Where the time goes", runs, time_split),
        _each("Gradients in the range of fp16", runs, gradient_part),
        _each("GPUs", runs, lambda run: _drawn(gpu_charts(run))),
        _each("Mistakes by class", runs, confusion_part),
        _each("Restarts and failures", runs, _restarts),
        _each("Evaluations", runs, _evaluations),
        _each("Shown by the recipe", runs, _shown_by_recipe),
        _each("Skipped steps", runs, _overflows),
        _each("Ranks that the others waited for", runs, _stragglers),
        _each("Warnings", runs, _warnings),
        _each("Details", runs, _details),
    ]
    text = "".join(parts)
    left_out = len(runs) - MAX_DETAILED
    title = f"Details of the first {MAX_DETAILED} runs; {left_out} more have pages of their own"
    return html.folded(title, text) if left_out > 0 else text


def _each(title: str, runs: Sequence[Run], part: Part) -> str:
    """A section with this part of each run."""
    several = len(runs) > 1
    bodies = [html.subsection(run.name if several else "", part(run)) for run in runs[:MAX_DETAILED]]
    return html.section(title, html.cells(bodies) if several else bodies[0])


def _subtitle(runs: Sequence[Run]) -> str:
    made = f"Report of {time.strftime('%Y-%m-%d %H:%M')}"
    if len(runs) > 1:
        return f"{len(runs)} runs. {made}."
    return f"{runs[0].directory.absolute()} · {made}."


def _restarts(run: Run) -> str:
    """Each restart and each end that was not done, with its reason."""
    history = run.history
    began = math.nan if history.began is None else history.began
    what: list[tuple[events.Event, str]] = [
        *(
            (each, f"resumed from {each.path} (attempt {each.attempt})")
            for each in history.all(events.RestartEvent)
        ),
        *(
            (end, f"{end.state}: {end.error or ''}")
            for end in history.all(events.EndEvent)
            if end.state != "done"
        ),
    ]
    rows = [
        {"after": duration(event.time - began), "step": number(event.step), "what": text[:MAX_TEXT]}
        for event, text in sorted(what, key=lambda each: each[0].time)
    ]
    return _rows("Restarts and failures", rows, "what")


def _evaluations(run: Run) -> str:
    return _rows("Evaluations", [evaluation_cells(event) for event in run.history.all(events.EvalEvent)])


def _overflows(run: Run) -> str:
    rows = [
        {
            "step": number(event.step),
            "loss scale": number(event.scale),
            "ranks": ", ".join(map(str, event.ranks)),
            "first parameters": listed(event.parameters, MAX_PARAMETERS),
        }
        for event in run.history.all(events.OverflowEvent)
    ]
    return _rows("Skipped steps", rows, "first parameters")


def _stragglers(run: Run) -> str:
    rows = [
        {
            "steps": f"{number(one.first_step)} to {number(one.last_step)}",
            "rank": number(one.rank),
            "late by, ms": number(one.late_ms),
            "step, ms": number(one.step_ms),
            "slow part": one.cause,
            "host": one.host,
        }
        for one in run.history.all(events.StragglerEvent)
    ]
    return _rows("Ranks that the others waited for", rows, "host")


def _rows(name: str, rows: Sequence[Mapping[str, str]], *texts: str) -> str:
    """A table of the first rows, and how many more there are."""
    return html.table(name, rows[:MAX_ROWS], texts) + html.listing(_left_out(len(rows)))


def _warnings(run: Run) -> str:
    texts = [f"step {one.step:,}: {one.text}" for one in run.history.all(events.WarningEvent)]
    return html.listing([*texts[:MAX_ROWS], *_left_out(len(texts))])


def _left_out(number: int) -> list[str]:
    return [f"and {number - MAX_ROWS:,} more, in {FILE_NAME}"] if number > MAX_ROWS else []


def _details(run: Run) -> str:
    decisions = run.history.all(events.DecisionEvent)
    report = html.preformatted("Classification report", run.classification_report)
    environment = json.dumps(run.environment, indent=2) if run.environment else ""
    return (
        html.folded("Decisions", html.listing(f"{one.topic} {one.text}" for one in decisions))
        + html.folded("Classification report", report)
        + html.folded("Environment", html.preformatted("Environment", environment))
        + html.folded("Config", html.preformatted("Config", run.config_text))
    )


def _shown_by_recipe(run: Run) -> str:
    """What the recipe gave after the last evaluation; of its pictures the paths."""
    event = run.history.last(events.AfterEvaluationEvent)
    if event is None:
        return ""
    texts = [html.subsection(name, html.preformatted(name, text)) for name, text in event.texts.items()]
    numbers = {name: number(value) for name, value in event.numbers.items()} | dict(event.pictures)
    return (
        html.paragraph(f"After step {event.step:,}.", "note")
        + html.listing(f"{name}: {text}" for name, text in numbers.items())
        + "".join(texts)
    )
