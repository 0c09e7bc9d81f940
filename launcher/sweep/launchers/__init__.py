"""Launchers: where the jobs of a sweep run. One file each: `devices`, `slurm`.

The sweep's process composes and checks all jobs, decides which one runs next, and writes `sweep.json`. Before
it submits a job it makes the job's folder and writes `job.json` there, the resolved config. A launcher starts
that folder as a job somewhere, says what has become of it, and stops it when asked. It never composes a
config, reads or writes no file of the sweep, decides no retry, and prints nothing but that
a scheduler does not answer.

A launcher that starts a process of its own runs `command_of(directory)`, on any machine on which the folder
and this Python exist: `python -m launcher job DIR`. The process writes the files of a run into DIR (such as
status.json, result.json, metrics.jsonl), saves on SIGTERM within `launch.grace_s`, and exits as a run does:
0, 75, ... The next attempt of a job resumes from its checkpoints by itself.

The scheduler calls all functions from the main thread, `poll` in a loop.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from launcher.config.messages import install_line
from launcher.errors import PreflightError
from launcher.os.lifetime import PYTHON
from launcher.sweep.state import SweepJob


@dataclass(frozen=True)
class JobEvent:
    """A job that started or ended since the last call of `poll`."""

    number: int  # of the job
    exit: int | None = None  # its exit code, 128 + N if signal N killed it; None: it runs from now on
    error: str = ""  # why, where its files cannot say it: a node that died, a refusal of the scheduler


class JobLauncher(Protocol):
    """Runs jobs. Use it as a context: at its end nothing that it started in this process is left."""

    def has_capacity(self, job: SweepJob) -> bool:
        """Whether this job may be submitted now. The scheduler waits for the first that may not."""

    def submit(self, job: SweepJob, directory: Path) -> None:
        """Start the job in this folder. Set `job.devices`, and `job.handle` where the job outlives us.

        A job that comes with a handle was submitted by an earlier process that was killed: follow it where it
        still runs or waits, and start it again only where it does not. Raises LauncherError where this
        launcher cannot start any job, such as a scheduler that refuses.
        """

    def poll(self, wait_s: float) -> Sequence[JobEvent]:
        """What has changed; waits for so many seconds at most, and no longer than for the first change.

        A signal handler may run meanwhile. A job that was submitted and ends by itself, is stopped, or gets
        lost has exactly one change with an exit code. Raises LauncherError where what runs the jobs does not
        answer.
        """

    def stop(self, job: SweepJob, at_once: bool = False) -> None:
        """Ask the job to save and end (SIGTERM), or kill it with all its processes.

        Does not wait for the end.
        """

    def save(self, job: SweepJob) -> None:
        """Ask the job to save a checkpoint and continue (SIGUSR1), where a signal can ask for that."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


def command_of(directory: Path) -> list[str]:
    """What starts the job of a folder in a fresh process."""
    return [*PYTHON, "-m", "launcher", "job", str(directory)]
