"""The console output during a run: decisions, progress, evaluations, warnings, the end.

Owns the text on stdout, on rank 0; `progress_bar` owns the bar on stderr. Reads only events, never the
engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from launcher.process.terminal import columns_of, wrapped
from launcher.telemetry.console.progress_bar import Bars, Lines, Progress
from launcher.telemetry.console.summary import end_lines
from launcher.telemetry.formatting import evaluation_cells, narrowed, number, table_lines, table_widths
from launcher.telemetry.step_time import TimeTotals, time_at_end
from launcher.telemetry.stream import Record

WIDEST_REPORT = 120  # columns of the classification report where there is no terminal


class Console:
    """Prints events: a bar per epoch where `err` is a terminal, else a line per `step` event.

    `run_dir` is printed at the end.
    """

    name = "the console"

    def __init__(
        self, out: TextIO, err: TextIO, run_dir: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._run_dir = run_dir
        self._progress: Progress = Bars(err) if err.isatty() else Lines(self._print, clock)
        self._times = TimeTotals()  # of the whole run, for the verdict at its end
        self._widths: dict[str, int] = {}  # by title, of the table of the last printed line
        self._report = self._sync = ""
        self._started = False
        self._shows: dict[str, Callable[[Record], None]] = {
            "decision": self._decision,
            "start": self._start,
            "step": self._step,
            "eval": self._evaluation,
            "after_evaluation": self._after_evaluation,
            "warning": self._warning,
            "report": self._keep_report,
            "end": self._end,
        }

    def write(self, record: Record) -> None:
        show = self._shows.get(record["event"])
        if show is not None:
            show(record)

    def advance(self, epoch: int, step: int) -> None:
        self._progress.advance(epoch, step)

    def close(self) -> None:
        self._progress.close()

    def _decision(self, record: Record) -> None:
        self._sync = record.get("sync") or self._sync
        self._print(f"{record['topic']} {record['text']}")

    def _start(self, record: Record) -> None:
        self._started = True
        self._progress.start(record)

    def _step(self, record: Record) -> None:
        self._times.add(record)
        self._progress.show(record)

    def _evaluation(self, record: Record) -> None:
        cells = evaluation_cells(record)
        widths = table_widths(cells, columns_of(self._out))
        self._print(*table_lines(cells, widths, with_titles=widths != self._widths))
        self._widths = widths

    def _after_evaluation(self, record: Record) -> None:
        shown = {name: number(value) for name, value in record["numbers"].items()}
        for name, text in (shown | record["texts"] | record["pictures"]).items():
            self._print(f"{name}: {text}")

    def _warning(self, record: Record) -> None:
        self._print(f"warning: {record['text']}")

    def _keep_report(self, record: Record) -> None:
        self._report = str(record["text"])

    def _end(self, record: Record) -> None:
        self._progress.close()
        columns = columns_of(self._out)
        report = narrowed(self._report, WIDEST_REPORT if columns is None else columns)
        if columns is not None and max(map(len, report.splitlines()), default=0) > columns:
            report = ""  # a table that wraps cannot be read; it is in the run's files
        if record.get("state") == "failed" and not self._started:
            return  # its error says it all: no file of such a run is worth reading
        shares = time_at_end(record) or self._times.shares()
        self._print(*end_lines(record, report, shares, self._run_dir, self._sync))

    def _print(self, *lines: str) -> None:
        self._widths = {}
        columns = columns_of(self._out)
        with self._progress.aside():
            print(*(wrapped(line, columns) for line in lines), sep="\n", file=self._out, flush=True)
