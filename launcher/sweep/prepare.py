"""From checked jobs to a sweep that can run: its directory, lock, record, and a folder for each job.

Owns how a sweep begins and how it continues: by the same command with its directory, or by sweep.resume=DIR
alone. Nothing has started when it returns.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launcher.config.composition import Request
from launcher.config.messages import quoted
from launcher.config.resolve import GRID
from launcher.config.schema import Config, SweepConfig
from launcher.errors import ConfigError, StorageError
from launcher.run_dir.atomic import clear_away
from launcher.run_dir.lock import locked
from launcher.run_dir.records import SWEEP
from launcher.sweep.hydra_sweep import SECTION, Planned, is_setting, jobs_of, made, placed, planned
from launcher.sweep.job import Job, write_job
from launcher.sweep.record import Record, recover, refuse_changes, refuse_foreign
from launcher.telemetry.tracker.wandb_environment import in_sweep, with_environment

RESUME = "sweep.resume"
RunOne = Callable[[Config, Sequence[str]], None]
AUTO, NEVER = "auto", "never"


def continued(request: Request) -> Request:
    """The recorded command of the sweep that `sweep.resume=DIR` names, where the request has no words but
    settings of the sweep; else the request, whose jobs are compared with those of the sweep later.
    """
    directory = _asked(request)
    if directory is None or any(not is_setting(line) for line in request.overrides):
        return request
    record = Record.read(directory)
    given = {line.partition("=")[0] for line in request.overrides}
    kept = [line for line in record.overrides if line.partition("=")[0] not in given]
    tree = None if record.config_dir is None else Path(record.config_dir)
    return Request((*kept, *request.overrides), tree, record.config_name, multirun=True)


def run_in_place(request: Request, configs: Sequence[Config], run_one: RunOne) -> Path:
    """Call `run_one(config, overrides)` for each checked job of a request, in order; returns the directory.

    `sweep.json` says how to continue on processes of our own; the states of the jobs are in their folders.
    """
    plan = planned(_in_its_directory(request), configs, jobs_of(request))
    new_record(request, plan).write(plan.directory)
    plan.save_master()
    for config, name, lines in zip(configs, plan.names, plan.overrides, strict=True):
        run_one(placed(config, made(plan.directory / name), plan.directory.name), lines)
    return plan.directory


@contextmanager
def prepared(request: Request, configs: Sequence[Config]) -> Iterator[tuple[Planned, Record, list[Config]]]:
    """A sweep whose directory exists, its record, and the config of each job; locked within the context.

    Of a search there are no configs: `Searching` adds its jobs to the record.

    Raises ConfigError for the directory of another sweep, program or process, StorageError for one that
    cannot be written.
    """
    settings = configs[0].sweep
    each = zip(configs, jobs_of(request), strict=True) if settings.name == GRID else ()
    jobs = {repr(config): (config, lines) for config, lines in each}
    if 0 < len(jobs) < len(configs):
        print(f"sweep: {len(configs) - len(jobs)} of {len(configs)} jobs equal others and are left out")
    found = [config for config, _ in jobs.values()]
    plan = planned(_in_its_directory(request), configs, [lines for _, lines in jobs.values()])
    directory = plan.directory
    if not (directory / SWEEP).exists():
        refuse_foreign(directory)  # before the lock, which is a file in it
    try:
        with locked(directory, f"{SECTION}.dir"):
            clear_away(directory)
            placed_jobs = _placed(plan, found)
            record = _record(request, plan, placed_jobs, settings)
            for job, config in zip(record.jobs, placed_jobs, strict=settings.name == GRID):
                made(directory / job.name)
                write_job(config, job.overrides)
            yield plan, record, placed_jobs
    except OSError as error:
        raise StorageError(
            f"the sweep's files cannot be written to {directory}: {error.strerror or error}. Choose a "
            f"writable place with {SECTION}.dir=DIR, or make room there."
        ) from error


def _placed(plan: Planned, configs: Sequence[Config]) -> list[Config]:
    return [place(config, plan.directory, job) for config, job in zip(configs, _jobs(plan), strict=True)]


def place(config: Config, directory: Path, job: Job) -> Config:
    """The config with what a job has of its sweep: directory, tracking group, name."""
    own = placed(config, directory / job.name, directory.name)
    return in_sweep(with_environment(own, job.overrides, os.environ), job.name, job.number)


def _record(request: Request, plan: Planned, configs: Sequence[Config], settings: SweepConfig) -> Record:
    """The record of a new sweep, or of the one in the directory, ready to continue."""
    directory, asked = plan.directory, settings.resume
    if (directory / SWEEP).exists():
        if asked == NEVER:
            raise ConfigError(
                f"{directory} already holds a sweep, and {RESUME}={NEVER}. Choose another directory, leave "
                f"{SECTION}.dir out for a new one, or continue it: {RESUME}={AUTO}."
            )
        record = Record.read(directory)
        if settings.name == GRID:
            overrides = dict(zip(plan.names, plan.overrides, strict=True))
            refuse_changes(record, directory, dict(zip(plan.names, configs, strict=True)), overrides)
        recover(record, directory)
        record.write(directory)
        return record
    if asked not in (AUTO, NEVER):
        raise ConfigError(f"{RESUME}={asked}: holds no sweep. Give the directory of one.")
    record = new_record(request, plan)
    record.write(directory, durable=True)  # before any other file: without it the directory is foreign
    plan.save_master()
    return record


def new_record(request: Request, plan: Planned) -> Record:
    tree = None if request.config_dir is None else str(request.config_dir.absolute())
    own = [line for line in request.overrides if not line.startswith((f"{SECTION}.dir=", f"{RESUME}="))]
    words = ("-m", f"{RESUME}={written(plan.directory)}")
    return Record(_jobs(plan), own, tree, request.config_name, words=words)


def _jobs(plan: Planned) -> list[Job]:
    return [
        Job(number, name, lines)
        for number, (name, lines) in enumerate(zip(plan.names, plan.overrides, strict=True))
    ]


def written(directory: Path) -> str:
    """A directory in Hydra's grammar."""
    return str(directory) if re.fullmatch(r"[\w./-]+", str(directory)) else quoted(str(directory))


def _asked(request: Request) -> Path | None:
    """The directory of sweep.resume; None for auto, never, or none given."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    lines = [line for line in request.overrides if line.startswith(f"{RESUME}=")]
    value = OverridesParser.create().parse_overrides(lines[-1:])[0].value() if lines else AUTO
    if not isinstance(value, str) or value in (AUTO, NEVER):
        return None
    return Path(value).expanduser().absolute()


def _in_its_directory(request: Request) -> Request:
    """The request with the directory of sweep.resume as that of the sweep."""
    directory = _asked(request)
    if directory is None:
        return request
    if not (directory / SWEEP).is_file():
        raise ConfigError(f"{RESUME}={directory}: holds no sweep. Give the directory of one.")
    others = [line for line in request.overrides if not line.startswith(f"{SECTION}.dir=")]
    return dataclasses.replace(request, overrides=(*others, f"{SECTION}.dir={written(directory)}"))
