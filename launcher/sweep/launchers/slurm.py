"""Jobs of a sweep on a Slurm cluster, one Slurm job each, submitted by Submitit.

What has become of a job is read from its own status.json and from squeue, because a cluster may have no
accounting. Partition, account and time limit are those of sbatch's own variables (SBATCH_PARTITION, ...).
The jobs outlive this process: the sweep that continues finds them by their names.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.messages import directory_override, install_line
from launcher.config.schema import SweepConfig
from launcher.errors import PreemptedError, PreflightError
from launcher.os import stdio
from launcher.run_dir.atomic import read_json
from launcher.run_dir.status import FILE_NAME
from launcher.sweep.launchers import JobEvent, JobLauncher, command_of
from launcher.sweep.progress import LOG
from launcher.sweep.state import SweepJob

FOLDER = "slurm"  # in the sweep's: the batch scripts, and what they print
EVERY_S = 3.0  # between two calls of squeue, which share one daemon with the whole cluster
QUEUED = 4  # jobs that wait in Slurm's queue, so that it can start one at once
NFS_CACHE_S = 10.0  # until what a job wrote last is seen here: NFS keeps attributes of files for seconds
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sinfo")
COMMAND_S = 60.0  # for a command of Slurm, whose daemon may be busy
# How often in a row squeue may fail before the sweep ends, and how long it is left alone in between: a
# restart of Slurm's daemon takes less. The jobs outlive the sweep.
TRIES, RETRY_S = 10, 15.0
Queued = tuple[str, str, str]  # state, nodes and name of a job in the queue
WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED")


@dataclass
class Submitted:
    job: SweepJob
    directory: Path
    id: str = ""
    since: float = 0.0  # in unix seconds: what it wrote before is of an earlier attempt
    runs: bool = False
    stopped: bool = False
    gone_s: float = 0.0  # since when squeue does not list it

    @property
    def name(self) -> str:
        """The name of the job in Slurm's queue."""
        return f"{self.directory.parent.name}/{self.directory.name}/{self.job.id}"


class SlurmLauncher(JobLauncher):
    """Runs jobs on the cluster of this machine's sbatch. Raises PreflightError if there is none.

    It asks no job to save: in a job of Slurm SIGUSR1 means that its time ends (launch.preempt_signals).
    """

    def __init__(self, sweep: SweepConfig) -> None:
        self._submitit = _submitit()
        self._parallel = sweep.parallel
        has_gpus = "gpu" in _ask("sinfo", "--noheader", "--format=%G")
        self._per_worker = "gpus_per_node" if has_gpus else "cpus_per_task"
        self._jobs: dict[int, Submitted] = {}
        self._next_s = 0.0
        self._failures = 0  # of squeue, in a row

    def has_capacity(self, job: SweepJob) -> bool:
        if self._failures:
            return False
        if self._parallel != "auto":
            return len(self._jobs) < self._parallel
        return sum(not each.runs for each in self._jobs.values()) < QUEUED

    def submit(self, job: SweepJob, directory: Path) -> None:
        """Give the job to Slurm, unless an earlier process has."""
        each = Submitted(job, directory)
        try:
            if not _is_queued(each):
                self._give(each)
        except PreflightError as error:
            raise PreflightError(f"{error} {_end_of_sweep(directory)}") from error
        self._jobs[job.number] = each

    def _give(self, each: Submitted) -> None:
        try:
            self._sbatch(each)
        except self._submitit.core.utils.FailedJobError as error:
            if not _is_queued(each):  # it may be: only the answer was lost
                problem = f"sweep.launcher=slurm: sbatch refuses the job: {_words(error)}."
                raise PreflightError(problem) from error

    def _sbatch(self, each: Submitted) -> None:
        job, directory = each.job, each.directory
        executor = self._submitit.SlurmExecutor(directory.parent / FOLDER)
        executor.update_parameters(
            job_name=each.name,
            time=None,  # the partition's; Submitit's own is five minutes
            stderr_to_stdout=True,
            # After Submitit's own, so that what the job prints is where other launchers have it.
            srun_args=["--output", str(directory.absolute() / LOG), "--open-mode=append"],
            **{self._per_worker: job.nproc},
        )
        each.since = time.time()
        # Submitit's process becomes the job's: Slurm's signals reach no handler of Submitit.
        command = command_of(directory.absolute())
        job.handle = each.id = executor.submit(os.execv, command[0], command).job_id

    def poll(self, wait_s: float) -> Sequence[JobEvent]:
        now = time.monotonic()
        if now < self._next_s:
            time.sleep(min(wait_s, self._next_s - now))
            return []
        self._next_s = now + EVERY_S
        try:
            queue = _queue() if self._jobs else {}
        except PreflightError as error:
            self._failures += 1
            if self._failures == TRIES:
                directory = next(iter(self._jobs.values())).directory
                raise PreflightError(f"{error} {_end_of_sweep(directory)}") from error
            if self._failures == 1:
                stdio.say(f"warning: {error} It is asked again every {RETRY_S:g} s", sys.stderr)
            self._next_s = time.monotonic() + RETRY_S
            return []
        self._failures = 0
        return [change for each in [*self._jobs.values()] for change in self._changes(each, queue)]

    def _changes(self, each: Submitted, queue: Mapping[str, Queued]) -> Iterator[JobEvent]:
        state, nodes, _ = queue.get(each.id, ("", "", ""))
        if state:
            each.gone_s = 0.0
            starts = not each.runs and state not in WAITS
            each.runs = state not in WAITS  # one whose node died waits again
            if starts:
                each.job.devices = [f"{nodes}/{number}" for number in range(each.job.nproc)]
                yield JobEvent(each.job.number)
            return
        each.gone_s = each.gone_s or time.monotonic()
        code = _end_of(each.directory, each.since)
        if code is None and not each.stopped and time.monotonic() - each.gone_s < NFS_CACHE_S:
            return
        if code == PreemptedError.exit_code and not each.stopped:
            # Slurm has asked it to leave for another job, or before a time limit: it resumes.
            return self.submit(each.job, each.directory)
        del self._jobs[each.job.number]
        if code is not None:
            yield JobEvent(each.job.number, code)
        elif each.stopped:
            yield JobEvent(each.job.number, 128 + signal.SIGTERM)
        else:
            log = each.directory.parent / FOLDER / f"{each.id}_0_log.out"  # of the batch script
            yield JobEvent(
                each.job.number, 1, f"Slurm's job {each.id} ended without a result; see also {log}"
            )

    def stop(self, job: SweepJob, at_once: bool = False) -> None:
        each = self._jobs[job.number]
        each.stopped = True
        # Without a signal Slurm cancels the job: SIGTERM, and SIGKILL after its KillWait. A signal to a job
        # that waits is an error. So is one to a job that has just ended, which is no reason to end the sweep.
        how = ["--signal=TERM"] if each.runs and not at_once else []
        with suppress(PreflightError):
            _ask("scancel", *how, each.id)


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        advice = f"Install it with: {install_line('submitit')}"
        raise PreflightError(f"sweep.launcher=slurm needs the package submitit. {advice}") from error
    if missing := [name for name in COMMANDS if not shutil.which(name)]:
        advice = "Start the sweep on a machine of a Slurm cluster, such as its login node."
        raise PreflightError(f"sweep.launcher=slurm: {', '.join(missing)} cannot be found. {advice}")
    return submitit


def _end_of_sweep(directory: Path) -> str:
    """The end of the error with which a sweep ends for Slurm's sake, by the folder of one of its jobs."""
    again = f"-m {directory_override('sweep.resume', directory.parent)}"
    return (
        f"The sweep has ended; jobs that Slurm has accepted run on. {again} follows them and runs the rest."
    )


def _is_queued(each: Submitted) -> bool:
    """Whether Slurm has the job, whose id is noted then."""
    for found, (state, _, called) in _queue().items():
        if called == each.name and state != "COMPLETING":
            each.job.handle = each.id = found
            return True
    return False


def _queue() -> dict[str, Queued]:
    """This user's jobs that wait or run, by id. Raises PreflightError where squeue does not answer."""
    lines = _ask("squeue", "--noheader", "--me", "--format=%i|%T|%N|%j").splitlines()
    fields = (line.split("|", 3) for line in lines)
    return {number: (state, nodes, name) for number, state, nodes, name in fields}


def _ask(*command: str) -> str:
    """What a command of Slurm prints. Raises PreflightError with its words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        raise PreflightError(
            f"sweep.launcher=slurm: {command[0]} did not answer in {COMMAND_S:g} s."
        ) from None
    if done.returncode:
        words = " ".join(done.stderr.split()).rstrip(".")
        raise PreflightError(f"sweep.launcher=slurm: {command[0]} fails: {words}.")
    return done.stdout


def _end_of(directory: Path, since: float) -> int | None:
    """The exit code in status.json, if the run has ended, and after `since` (unix seconds)."""
    try:
        found = read_json(directory / FILE_NAME)
        ended = found.get("exit") is not None and float(found.get("updated") or 0) >= since
        return int(found["exit"]) if ended else None
    except (OSError, ValueError, TypeError):
        return None


def _words(error: Exception) -> str:
    """The last line of sbatch's, out of Submitit's report of its failure."""
    return str(error).strip().splitlines()[-1].strip().rstrip(".")
