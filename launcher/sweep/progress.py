"""What a sweep prints: a line per event, and on a terminal one live table below them.

Owns the terminal while several jobs run. A single job at a time prints for itself, and has no table.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.os import terminal
from launcher.os.stdio import write
from launcher.sweep.record import State, SweepJob
from launcher.telemetry.formatting import duration, metric

if TYPE_CHECKING:
    from launcher.report.watching import RunView

EVERY_S = 1.0  # from one drawing of the table to the next
LOG = "output.log"  # of a job, in its folder: what it prints where several run


class SweepProgress:
    """The lines and the table of one sweep. `alone`: jobs run one at a time, and print for themselves."""

    def __init__(
        self, directory: Path, jobs: Sequence[SweepJob], alone: bool, trials: int | None = None
    ) -> None:
        """`trials` is how many jobs a search will have, which adds to `jobs`."""
        self._directory, self._jobs, self._alone, self._trials = directory, jobs, alone, trials
        self._drawn, self._drawn_s = 0, 0.0
        self._live = not alone and sys.stdout.isatty()
        self._watched: dict[int, RunView] = {}  # the jobs that run, by number

    def starting(self, job: SweepJob) -> None:
        again = f" (attempt {job.attempts})" if job.attempts > 1 else ""
        self.say(f"sweep: job {self._of(job)}{again}: {self._directory / job.name}")

    def ended(self, job: SweepJob) -> None:
        """A job that failed is reported at once, with its reason and where its output is."""
        self._watched.pop(job.number, None)
        after = "" if self._alone else f" after {duration(job.seconds)}"
        if job.state in (State.DONE, State.PRUNED):
            if job.state == State.PRUNED or not self._alone:
                self.say(f"sweep: job {self._of(job)} {job.state}{after}{_metric_of(job)}")
            return
        how = ("stopped" if job.state == State.STOPPED else "failed") + after
        if job.state != State.STOPPED:
            how += " and runs again" * (job.state == State.WAITING)
            if not (self._alone and job.error):  # else on the terminal, by the job
                how += f", exit {job.exit}: {(job.error or 'no reason is known').rstrip('.')}"
            how += "" if self._alone else f"; output: {self._directory / job.name / LOG}"
        self.say(f"sweep: job {self._of(job)} {how}", error=True)

    def say(self, text: str, error: bool = False) -> None:
        self.erase()
        terminal.say(text, sys.stderr if error else sys.stdout)

    def refresh(self) -> None:
        """Draw the table again, where there is one and its time has come."""
        if self._live and time.monotonic() - self._drawn_s >= EVERY_S:
            size = shutil.get_terminal_size()
            lines = self._table(size.columns, max(4, size.lines // 2))
            self.erase()
            write("".join(f"{line}\n" for line in lines), sys.stdout)
            self._drawn, self._drawn_s = len(lines), time.monotonic()

    def erase(self) -> None:
        """Remove the table, where one is drawn."""
        if self._drawn:
            write(f"\x1b[{self._drawn}A\x1b[J", sys.stdout)  # up so many lines, clear to the end
            self._drawn = 0

    def _table(self, columns: int, rows: int) -> list[str]:
        """How the sweep stands: a line of counts, and one for each job that runs."""
        counts = Counter(job.state for job in self._jobs)
        head = f"{len(self._jobs)} jobs: "
        head += ", ".join(f"{counts[each]} {each}" for each in State if counts[each])
        running = [job for job in self._jobs if job.state == State.RUNNING][: max(1, rows - 1)]
        width = max((len(job.name) for job in running), default=0)
        return [line[: columns - 1] for line in (head, *(self._line(job, width) for job in running))]

    def _line(self, job: SweepJob, width: int) -> str:
        from launcher.report.watching import RunView, job_line

        try:
            if job.number not in self._watched:
                self._watched[job.number] = RunView(self._directory / job.name)
            return job_line(self._watched[job.number].view(), width)
        except OSError as error:  # which must not end the sweep
            return f"{job.name}  cannot be read: {error.strerror or error}"

    def _of(self, job: SweepJob) -> str:
        return f"{job.number + 1} of {self._trials or len(self._jobs)}"


def _metric_of(job: SweepJob) -> str:
    if job.metric is None or job.metric_name is None:
        return ""
    return f": {job.metric_name} {metric(job.metric_name, job.metric)}"
