"""What a sweep runs, and how far each job is: `sweep.json`, and a `job.json` in the folder of each job.

Owns both files, and what a process that continues the sweep makes of them: which jobs are left, and whether
the command still asks for the same jobs. One process at a time writes sweep.json, with the lock of the
sweep's directory, atomically at each event. A job.json has the resolved config, with the values of
environment variables, and the overrides: `python -m launcher job DIR` runs it on any machine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from pathlib import Path

from launcher.config.codec import decoded, encoded
from launcher.config.schema import Config, to_dict
from launcher.config.validation import parse
from launcher.errors import DIVERGED, ConfigError, listed
from launcher.run_dir.atomic import json_line, read_json, write_content, write_json
from launcher.run_dir.lock import locked
from launcher.run_dir.records import JOB, RESULT, SWEEP, foreign_to_a_run
from launcher.run_dir.result import Result


class JobState(StrEnum):
    """What has become of a job."""

    RUNNING = auto()
    WAITING = auto()
    DONE = auto()
    FAILED = auto()
    STOPPED = auto()  # on request, and saved
    PRUNED = auto()


OVER = (JobState.DONE, JobState.FAILED, JobState.PRUNED)  # which a sweep that continues does not run again


@dataclass
class SweepJob:
    """A job as `sweep.json` records it. A launcher may set `devices` and `handle`, and nothing else."""

    number: int  # from 0; never changes
    name: str  # of its folder in that of the sweep
    overrides: Sequence[str]
    nproc: int = 1  # workers, each with a GPU where there are any
    state: str = JobState.WAITING
    attempts: int = 0  # started so far
    failures: int = 0  # of these; a sweep that continues counts again from 0
    devices: Sequence[str] = ()  # of the latest attempt: UUIDs of GPUs, or cores; as the launcher names them
    exit: int | None = None  # of the latest attempt
    error: str | None = None  # its reason, in one line
    metric_name: str | None = None
    metric: float | None = None  # of the result, or of the evaluation by which it was pruned
    higher_is_better: bool | None = None  # of that metric; None before there is one
    started: float | None = None  # the latest attempt, in unix seconds
    seconds: float = 0.0  # of all attempts that have ended
    device_seconds: float = 0.0  # the same times nproc
    handle: str | None = None  # by which a launcher finds a job that outlives the sweep's process
    # Random, so that a scheduler's jobs of two sweeps whose folders have one name are told apart.
    id: str = field(default_factory=lambda: secrets.token_hex(4), compare=False)


@dataclass
class SweepState:
    """The content of the file."""

    jobs: Sequence[SweepJob]  # by number; a search adds to them
    overrides: Sequence[str]  # as typed
    config_dir: str | None = None

    @classmethod
    def read(cls, directory: Path) -> SweepState:
        """Raises ConfigError for a directory without a sweep."""
        try:
            content = read_json(directory / SWEEP)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory}: holds no sweep: {SWEEP} cannot be read ({error}).") from error
        return decoded(cls, content)

    def write(self, directory: Path, durable: bool = False) -> None:
        """Replace the file, with a line for each job. Raises OSError."""
        jobs = b",\n".join(json_line(encoded(job)).strip() for job in self.jobs)
        rest = json_line({key: value for key, value in encoded(self).items() if key != "jobs"})
        write_content(directory / SWEEP, b'{"jobs": [\n' + jobs + b"\n],\n" + rest[1:], durable)

    @property
    def left(self) -> list[SweepJob]:
        return [job for job in self.jobs if job.state not in OVER]

    @property
    def device_seconds(self) -> float:
        return sum(job.device_seconds for job in self.jobs)


def take_result(job: SweepJob, directory: Path) -> None:
    """What the job's result.json says of its metric and failure. A file that is absent changes nothing."""
    try:
        result = decoded(Result, read_json(directory / RESULT))
    except (OSError, ValueError):
        return
    if result.state == JobState.PRUNED:  # its metric is that of the evaluation which decided
        job.state, job.exit = JobState.PRUNED, result.exit
        return
    job.metric_name, job.metric = result.metric_name, result.metric
    job.higher_is_better = result.higher_is_better
    job.error = (result.error or "").partition("\n")[0] or None
    if result.state == JobState.DONE:
        job.state, job.exit = JobState.DONE, 0


def record_job(directory: Path) -> None:
    """Write how the job in this folder ended to the sweep.json beside it, unless a sweep runs there now.

    For a job that was run by itself. Raises OSError.
    """
    sweep_dir = directory.parent
    with suppress(ConfigError):  # without a sweep, or with one that is running and records it
        record = SweepState.read(sweep_dir)
        with locked(sweep_dir):
            for job in record.jobs:
                if job.name == directory.name:
                    take_result(job, directory)
                    record.write(sweep_dir)


def count_time(job: SweepJob, until: float) -> None:
    """Add the time since the latest start, until so many unix seconds, to that of the job."""
    if job.started is not None:
        seconds = max(0.0, until - job.started)
        job.seconds += seconds
        job.device_seconds += seconds * job.nproc
        job.started = None


def recover(record: SweepState, directory: Path) -> None:
    """Make the jobs ready for a process that continues the sweep, after the end of another at any moment.

    What is done is kept, with what a job of a killed process has still written. Jobs that failed run again,
    for the user may have mended the cause; not those that diverged, which is a result, nor those of a search
    that were refused as they were drawn.
    """
    for job in record.jobs:
        if job.state == JobState.RUNNING:
            job.state = JobState.WAITING
            take_result(job, directory / job.name)
            job.started = None
        elif (
            job.state == JobState.FAILED and job.attempts and job.exit != DIVERGED
        ) or job.state not in OVER:
            job.state = JobState.WAITING
        job.failures = 0


def refuse_foreign(directory: Path) -> None:
    """Raise ConfigError for the directory of something else, before anything is written to it."""
    if foreign := foreign_to_a_run(directory):
        raise ConfigError(
            f"hydra.sweep.dir={directory} holds no sweep, and files that do not belong to one: "
            f"{listed(foreign, 3)}. Give a new name, or the directory of a sweep to continue."
        )


def write_job(config: Config, overrides: Sequence[str]) -> None:
    """Write job.json to the folder `config.run.dir`, which exists. Raises OSError."""
    write_json(Path(config.run.dir) / JOB, {"overrides": list(overrides), "config": to_dict(config)})


def read_job(directory: Path) -> tuple[Config, tuple[str, ...]]:
    """Config and overrides of the job in this folder, which may have moved.

    Raises ConfigError for a folder without a job, and for a job of another version.
    """
    try:
        record = read_json(directory / JOB)
        config, overrides = parse(record["config"]), record["overrides"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{directory}: holds no {JOB} that this version can read ({error})"
        raise ConfigError(f"{problem}. Give the folder of a job of a sweep.") from error
    placed = replace(config, run=replace(config.run, dir=str(directory.absolute())))
    return placed, tuple(map(str, overrides))
