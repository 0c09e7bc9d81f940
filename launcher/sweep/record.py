"""`sweep.json`: what a sweep runs, and how far each job is. Rewritten atomically at each event.

Owns the file, and what a process that continues the sweep makes of it: which jobs are left, and whether the
command still asks for the same jobs. One process at a time writes it, with the lock of the sweep's directory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.config.messages import directory_override, shortened
from launcher.config.schema import Config
from launcher.errors import DIVERGED, ConfigError, listed
from launcher.run_dir.atomic import json_line, read_json, write_content
from launcher.run_dir.codec import decoded, encoded
from launcher.run_dir.records import CONFIG, JOB, RESULT, SWEEP, foreign_to_a_run
from launcher.run_dir.result import Result
from launcher.run_dir.status import FILE_NAME as STATUS
from launcher.sweep.job import DONE, FAILED, OVER, PRUNED, RUNNING, WAITING, Job, differences

VERSION = 1
SHOWN, LONGEST = 5, 120  # differences in an error, and the characters of each


@dataclass
class Record:
    """The content of the file."""

    jobs: Sequence[Job]  # by number; a search adds to them
    overrides: Sequence[str]  # as typed
    config_dir: str | None = None
    config_name: str = "config"
    seconds: float = 0.0  # of all processes that have run this sweep
    version: int = VERSION
    words: Sequence[str] = field(default_factory=tuple)  # that continue the sweep, after the program's name

    @classmethod
    def read(cls, directory: Path) -> Record:
        """Raises ConfigError for a directory without a sweep, or with one of another version."""
        try:
            content = read_json(directory / SWEEP)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory}: holds no sweep: {SWEEP} cannot be read ({error}).") from error
        if content.get("version") != VERSION:
            raise ConfigError(
                f"{directory}: the {SWEEP} there is of another version of the launcher, and its sweep cannot "
                "be continued by this one. Choose another directory with hydra.sweep.dir=DIR."
            )
        return decoded(cls, content)

    def write(self, directory: Path, durable: bool = False) -> None:
        """Replace the file, with a line for each job. Raises OSError."""
        jobs = b",\n".join(json_line(encoded(job)).strip() for job in self.jobs)
        rest = json_line({key: value for key, value in encoded(self).items() if key != "jobs"})
        write_content(directory / SWEEP, b'{"jobs": [\n' + jobs + b"\n],\n" + rest[1:], durable)

    @property
    def left(self) -> list[Job]:
        return [job for job in self.jobs if job.state not in OVER]

    @property
    def device_seconds(self) -> float:
        return sum(job.device_seconds for job in self.jobs)


def take_result(job: Job, directory: Path) -> None:
    """What the job's result.json says of its metric and failure. A file that is absent changes nothing."""
    try:
        result = decoded(Result, read_json(directory / RESULT))
    except (OSError, ValueError):
        return
    if result.state == PRUNED:  # its metric is that of the evaluation which decided
        job.state, job.exit = PRUNED, result.exit
        return
    job.metric_name, job.metric = result.metric_name, result.metric
    job.higher_is_better = result.higher_is_better
    job.error = (result.error or "").partition("\n")[0] or None
    if result.state == DONE:
        job.state, job.exit = DONE, 0


def count_time(job: Job, until: float) -> None:
    """Add the time since the latest start, until so many unix seconds, to that of the job."""
    if job.started is not None:
        seconds = max(0.0, until - job.started)
        job.seconds += seconds
        job.device_seconds += seconds * job.nproc
        job.started = None


def recover(record: Record, directory: Path) -> None:
    """Make the jobs ready for a process that continues the sweep, after the end of another at any moment.

    What is done is kept, with what a job of a killed process has still written. Jobs that failed run again,
    for the user may have mended the cause; not those that diverged, which is a result.
    """
    for job in record.jobs:
        if job.state == RUNNING:
            job.state = WAITING
            take_result(job, directory / job.name)
            count_time(job, _last_sign(directory / job.name, job.started))
        elif (job.state == FAILED and job.exit != DIVERGED) or job.state not in OVER:
            job.state = WAITING
        job.failures = 0


def refuse_changes(record: Record, directory: Path, planned: Mapping[str, Config]) -> None:
    """Raise ConfigError unless the jobs of a command, by name, are those of the sweep in this directory."""
    there = {job.name for job in record.jobs}
    found = [f"{name} is new" for name in planned if name not in there]
    found += [f"{job.name} is missing" for job in record.jobs if job.name not in planned]
    for name, config in planned.items():
        if name in there and (directory / name / JOB).exists():
            found += differences(directory / name, config)
    refuse_differences(directory, list(dict.fromkeys(found)))


def refuse_differences(directory: Path, found: Sequence[str]) -> None:
    """Raise ConfigError with what differs between a command and the sweep in this directory, if anything."""
    if found:
        differences = listed([shortened(each, LONGEST) for each in found], SHOWN, "; ")
        raise ConfigError(
            f"{directory} holds another sweep. To continue that one, give no other words: -m "
            f"{directory_override('sweep.resume', directory)}. For this one, choose another directory with "
            f"hydra.sweep.dir=DIR. What differs: {differences}."
        )


def refuse_foreign(directory: Path) -> None:
    """Raise ConfigError for the directory of something else, before anything is written to it."""
    foreign = [CONFIG] if (directory / CONFIG).exists() else foreign_to_a_run(directory)
    if foreign:
        raise ConfigError(
            f"hydra.sweep.dir={directory} holds files that do not belong to a sweep: {listed(foreign, 3)}. A "
            "sweep needs a directory of its own: a new name, an empty one, or that of a sweep to continue."
        )


def _last_sign(directory: Path, started: float | None) -> float:
    """When the job last wrote its status, in unix seconds; else its start."""
    try:
        return min(time.time(), float(read_json(directory / STATUS).get("updated") or 0))
    except (OSError, ValueError, TypeError):
        return started or 0.0
