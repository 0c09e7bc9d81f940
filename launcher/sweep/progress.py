"""What a sweep prints: a line per event. A single job at a time prints for itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.os import stdio
from launcher.sweep.state import JobState, SweepJob
from launcher.telemetry.formatting import duration, metric

LOG = "output.log"  # of a job, in its folder: what it prints where several run


class SweepProgress:
    """The lines of one sweep. `alone`: jobs run one at a time, and print for themselves."""

    def __init__(
        self, directory: Path, jobs: Sequence[SweepJob], alone: bool, trials: int | None = None
    ) -> None:
        """`trials` is how many jobs a search will have, which adds to `jobs`."""
        self._directory, self._jobs, self._alone, self._trials = directory, jobs, alone, trials

    def starting(self, job: SweepJob) -> None:
        again = f" (attempt {job.attempts})" if job.attempts > 1 else ""
        self.say(f"sweep: job {self._of(job)}{again}: {self._directory / job.name}")

    def ended(self, job: SweepJob) -> None:
        """A job that failed is reported at once, with its reason and where its output is."""
        starts = job.attempts > 0  # a job of a search may be refused as it is drawn
        after = "" if self._alone or not starts else f" after {duration(job.seconds)}"
        if job.state in (JobState.DONE, JobState.PRUNED):
            if job.state == JobState.PRUNED or not self._alone:
                self.say(f"sweep: job {self._of(job)} {job.state}{after}{_metric_of(job)}")
            return
        how = ("stopped" if job.state == JobState.STOPPED else "failed") + after
        if job.state != JobState.STOPPED:
            how += " and runs again" * (job.state == JobState.WAITING)
            if not (self._alone and job.error and starts):  # else on the terminal, by the job
                how += f", exit {job.exit}: {(job.error or 'no reason is known').rstrip('.')}"
            how += "" if self._alone or not starts else f"; output: {self._directory / job.name / LOG}"
        self.say(f"sweep: job {self._of(job)} {how}", error=True)

    def say(self, text: str, error: bool = False) -> None:
        stdio.say(text, sys.stderr if error else sys.stdout)

    def _of(self, job: SweepJob) -> str:
        return f"{job.number + 1} of {self._trials or len(self._jobs)}"


def _metric_of(job: SweepJob) -> str:
    if job.metric is None or job.metric_name is None:
        return ""
    return f": {job.metric_name} {metric(job.metric_name, job.metric)}"
