"""Runs the jobs of a sweep on a launcher: the next one as soon as there is room, until none is left.

Owns the order of events and every change of a job's state, and writes each to sweep.json. Which jobs there
are is decided by the command or by a search; where one runs, by the launcher.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path

from launcher import errors
from launcher.config.schema import SweepConfig
from launcher.errors import DIVERGED, ConfigError, PreemptedError, StorageError, counted
from launcher.os.signals import SAVING, StopSignal
from launcher.run_dir.pruning import PruneRequest, ask_to_prune
from launcher.sweep.asha import Pruner
from launcher.sweep.launchers import JobEvent, JobLauncher
from launcher.sweep.progress import SweepProgress
from launcher.sweep.search import Searching
from launcher.sweep.state import JobState, SweepJob, SweepState, count_time, take_result

POLL_S = 0.2  # longest wait for a change, after which signals are looked at
# A further attempt would end in the same way: the config is wrong, or the training diverges.
FINAL = (ConfigError.exit_code, DIVERGED)
REFUSED_IN_A_ROW = 20  # jobs that cannot be composed, after which the space is taken for a mistake


class Scheduler:
    """One run of a sweep to its end, or to a request to stop. `reason` says why no further job started.

    The jobs of the record run by number; where all have started, `search` adds further ones.
    """

    def __init__(
        self,
        directory: Path,
        record: SweepState,
        launcher: JobLauncher,
        settings: SweepConfig,
        progress: SweepProgress,
        signals: StopSignal,
        pruner: Pruner | None = None,
        search: Searching | None = None,
    ) -> None:
        self.reason = ""
        self._directory, self._record, self._pruner, self._search = directory, record, pruner, search
        self._launcher, self._settings, self._progress, self._signals = launcher, settings, progress, signals
        self._running: dict[int, SweepJob] = {}
        self.asked = self.asked_at_once = False  # to stop, before all jobs are done
        self._changed = True  # since sweep.json was written: once for all jobs that end and start together

    def run(self) -> None:
        """Returns when no job runs any more, and none may start.

        Raises OSError and StorageError where files of the sweep cannot be written, ConfigError where no job
        of a search can run: once the jobs that run have saved and ended.
        """
        failure: Exception | None = None
        while True:
            self._forward_signals()
            try:
                while not self.reason and (job := self._startable()) is not None:
                    self._start(job)
                if self._changed:  # also after a failure: the disk may have room again
                    self._write()
                if not self._running and (self.reason or self._next() is None):
                    break
            except (OSError, StorageError, ConfigError) as error:
                failure = failure or error
                if not self.reason:
                    self._stop("no further job can start")
                if not self._running:
                    break
            # All are taken before any job is stopped: the launcher has forgotten those that have ended.
            changed = [self._take(change) for change in self._launcher.poll(POLL_S)]
            failed = next((job for job in changed if self._is_failure(job)), None)
            if failed is not None and self._settings.on_failure == "stop" and not self.reason:
                self._stop(f"job {failed.number + 1} failed (sweep.on_failure=stop)")
            if self._pruner is not None:
                for job in self._pruner.to_prune([*self._running.values()]):
                    request = PruneRequest(job.error or "", self._settings.keep_pruned)
                    with suppress(OSError):  # the job then runs to its end
                        ask_to_prune(self._directory / job.name, request)
                    self._changed = True  # the metric that decided
        if failure is not None:
            raise failure

    def _is_failure(self, job: SweepJob) -> bool:
        """Whether the job failed; that a trial of a search diverges says something of its values."""
        return job.state == JobState.FAILED and not (self._search is not None and job.exit == DIVERGED)

    def _next(self) -> SweepJob | None:
        """The job to submit next, which stays the same until it is; None if there is none now."""
        jobs = [*self._record.jobs]
        if self._pruner is not None and self._search is None:
            # In shuffled order: of an ordered grid each job could be better than those before it.
            random.Random(len(jobs)).shuffle(jobs)
        waiting = next((job for job in jobs if job.state == JobState.WAITING), None)
        if waiting is not None or self._search is None:
            return waiting
        for _ in range(REFUSED_IN_A_ROW):
            job = self._search.next()
            if job is None or job.state == JobState.WAITING:
                return job
            self._progress.ended(job)
        assert job is not None
        raise ConfigError(f"{REFUSED_IN_A_ROW} jobs of the search in a row cannot run. The last: {job.error}")

    def _startable(self) -> SweepJob | None:
        """The next job, where the launcher has room."""
        job = self._next()
        return job if job is not None and self._launcher.has_capacity(job) else None

    def _start(self, job: SweepJob) -> None:
        job.state, job.attempts, job.exit, job.error = JobState.RUNNING, job.attempts + 1, None, None
        job.started, self._changed = time.time(), True
        self._progress.starting(job)
        self._launcher.submit(job, self._directory / job.name)
        self._running[job.number] = job
        if job.handle is not None:  # this process may be killed at any moment, and the job would go on
            self._write()

    def _take(self, change: JobEvent) -> SweepJob:
        job, self._changed = self._running[change.number], True
        if change.exit is None:  # it has waited in a scheduler's queue until now
            job.started = time.time()
            return job
        del self._running[job.number]
        job.exit, job.handle = change.exit, None
        count_time(job, time.time())
        job.state = self._state_after(job, change)
        self._progress.ended(job)
        return job

    def _state_after(self, job: SweepJob, change: JobEvent) -> str:
        assert change.exit is not None
        if change.exit == 0:
            take_result(job, self._directory / job.name)
            return JobState.DONE
        if change.exit == errors.PRUNED:
            return JobState.PRUNED
        job.error = None
        take_result(job, self._directory / job.name)
        job.exit, job.error = change.exit, change.error or job.error
        if change.exit == PreemptedError.exit_code or (self.asked and change.exit in errors.STOPPED):
            return JobState.STOPPED
        job.failures += 1
        stops = self.asked or self._signals.stop is not None  # the latter is not obeyed yet
        again = job.failures <= self._settings.retries and change.exit not in FINAL and not stops
        return JobState.WAITING if again else JobState.FAILED

    def _forward_signals(self) -> None:
        arrived = self._signals.pop_received()
        if self._signals.stop is None and any(number in SAVING for number in arrived):
            for job in self._running.values():
                self._launcher.save(job)
        if self._signals.stop is not None and not self.asked:
            self._stop(f"stopped by {self._signals.stop.name}")
        if self._signals.force_quit and not self.asked_at_once:
            self.asked_at_once = True
            for job in self._running.values():
                self._launcher.stop(job, at_once=True)

    def _stop(self, reason: str) -> None:
        self.reason, self.asked = reason, True
        if self._running:
            self._progress.say(f"sweep: {reason}; {counted(len(self._running), 'job')} to save and stop")
        for job in self._running.values():
            self._launcher.stop(job)

    def _write(self) -> None:
        self._record.write(self._directory)
        self._changed = False
