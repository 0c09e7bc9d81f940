"""The console output during a run: decisions, progress, evaluations, warnings, the end.

Owns the text on stdout, on rank 0; `progress_bar` owns the bar on stderr. Reads only events, never the
engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

import launcher.telemetry.events as events
from launcher.errors import counted
from launcher.os.stdio import say
from launcher.telemetry.console.progress_bar import ProgressBar
from launcher.telemetry.formatting import (
    duration,
    evaluation_cells,
    metric,
    metric_title,
    number,
    rate,
    step_line,
    table_lines,
    table_widths,
)
from launcher.telemetry.status import EtaEstimator
from launcher.telemetry.step_time import PARTS, TimeShares, time_at_end
from launcher.telemetry.stream import Sink


class Console(Sink):
    """Prints events: a bar per epoch where `err` is a terminal, else a line per `step` event.

    `run_dir` is printed at the end.
    """

    name = "the console"

    def __init__(
        self, out: TextIO, err: TextIO, run_dir: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._run_dir = run_dir
        self._bar = ProgressBar(err, clock) if err.isatty() else None
        self._pace = EtaEstimator(clock)  # of the lines where there is no bar
        self._plan = events.StartEvent(0)
        self._widths: dict[str, int] = {}  # by title, of the table of the last printed line
        self._report = self._sync = ""
        self._started = False

    def write(self, event: events.Event) -> None:
        match event:
            case events.DecisionEvent():
                self._sync = str(event.facts.get("sync") or self._sync)
                self._print(f"{event.topic} {event.text}")
            case events.StartEvent():
                self._started, self._plan = True, event
                self._print(f"directory {self._run_dir}")  # `watch` and `report` take it while the run trains
                if self._bar is not None:
                    self._bar.plan = event
            case events.StepEvent():
                self._step(event)
            case events.EvalEvent():
                self._evaluation(event)
            case events.AfterEvaluationEvent():
                shown = {name: number(value) for name, value in event.numbers.items()}
                for name, text in {**shown, **event.texts, **event.pictures}.items():
                    self._print(f"{name}: {text}")
            case events.WarningEvent():
                self._print(f"warning: {event.text}")
            case events.ReportEvent():
                self._report = event.text
            case events.EndEvent():
                self._end(event)

    def on_step(self, epoch: int, step: int) -> None:
        if self._bar is not None:
            self._bar.on_step(epoch, step)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _step(self, event: events.StepEvent) -> None:
        if self._bar is not None:
            self._bar.show(event)
        else:
            eta_s = self._pace.eta_s(event.step, self._plan.total_steps)
            self._print(step_line(event, self._plan.epochs, self._plan.total_steps, eta_s))

    def _evaluation(self, event: events.EvalEvent) -> None:
        cells = evaluation_cells(event)
        widths = table_widths(cells)
        self._print(*table_lines(cells, widths, with_titles=widths != self._widths))
        self._widths = widths

    def _end(self, event: events.EndEvent) -> None:
        self.close()
        if event.state == "failed" and not self._started:
            return  # its error says it all: no file of such a run is worth reading
        lines = end_lines(event, self._report, time_at_end(event), self._run_dir, self._sync)
        self._print(*lines)

    def _print(self, *lines: str) -> None:
        self._widths = {}
        with nullcontext() if self._bar is None else self._bar.paused():
            say("\n".join(lines), self._out)


def end_lines(
    end: events.EndEvent, report: str, shares: TimeShares | None, run_dir: Path, sync: str = ""
) -> list[str]:
    """`report` is the classification report, `sync` the command that uploads an offline run; "" if none."""
    lines = ["", report.rstrip(), ""] if report else [""]
    lines.append(_headline(end))  # an error is printed once, on stderr, by whoever ends the run
    if shares is not None:
        lines += [shares.verdict, _parts(shares)]
    lines.append(f"files: {run_dir}")
    if sync:
        lines.append(f"to upload the run to wandb: {sync}")
    return lines


def _headline(end: events.EndEvent) -> str:
    parts = [f"{end.state} after {counted(end.step, 'step')}"]
    if end.seconds is not None:
        since = f" since step {end.since_step:,}" if end.since_step else ""
        parts.append(f"in {duration(end.seconds)}{since}")
    if end.samples_per_s is not None:
        parts.append(f"at {rate(end.samples_per_s)} samples/s")
    metrics = end.metrics or {}
    shown = ", ".join(f"{metric_title(name)} {metric(name, value)}" for name, value in metrics.items())
    name, best = end.metric_name, end.best_metric
    if name is not None and best is not None and end.best_step != end.step:
        shown += f"; the best {metric_title(name)}: {metric(name, best)} after step {end.best_step:,}"
    return " ".join(parts) + (f": {shown}" if shown else "")


def _parts(shares: TimeShares) -> str:
    parts = ", ".join(f"{part.removesuffix('_ms')} {shares.parts_ms[part]:.1f}" for part in PARTS)
    return f"step {shares.step_ms:.1f} ms on average: {parts}, other {shares.other_ms:.1f}"
