"""From checked jobs to a sweep that can run: its directory, lock, record, and a folder for each job.

Owns how a sweep begins and how it continues: by the same command with its directory, or by sweep.resume=DIR
alone. Nothing has started when it returns.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.config.composition import Request
from launcher.config.messages import directory_override
from launcher.config.overrides import SWEEP_DIRECTORY as DIRECTORY
from launcher.config.resolve import GRID, space_of
from launcher.config.schema import Config, to_dict
from launcher.config.search_space import Space
from launcher.errors import ConfigError, first_line, listed
from launcher.run_dir.atomic import clear_away, failing_as_storage_error
from launcher.run_dir.claim import new_directory
from launcher.run_dir.lock import locked
from launcher.run_dir.records import SWEEP
from launcher.sweep.state import SweepJob, SweepState, recover, refuse_foreign, write_job
from launcher.telemetry.tracker.wandb_environment import in_sweep, with_environment

ROOT = Path("multirun")
RESUME = "sweep.resume"
AUTO, NEVER = "auto", "never"
# Sections that do not change what a job learns; overrides of others are those of one sweep, as is the kind of
# search (sweep=NAME).
NO_RESULT = ("hydra", "sweep", "run", "tracker", "telemetry", "checkpoint", "recipes", "launch")
SHOWN = 5  # differences in an error
NAME_LENGTH = 100  # characters of a job's folder: file systems allow 255 bytes, a terminal shows this many


def continued(request: Request) -> Request:
    """The recorded command of the sweep that `sweep.resume=DIR` names, where the request has no words but
    settings of the sweep; else the request, whose jobs are compared with those of the sweep later.
    """
    directory = _to_resume(request.value_of(RESUME))
    if directory is None or any(not is_setting(line) for line in request.overrides):
        return request
    record = SweepState.read(directory)
    given = {line.partition("=")[0] for line in request.overrides}
    kept = [line for line in record.overrides if line.partition("=")[0] not in given]
    tree = None if record.config_dir is None else Path(record.config_dir)
    return Request((*kept, *request.overrides), tree, multirun=True)


@contextmanager
def prepared(request: Request, configs: Sequence[Config]) -> Iterator[tuple[Path, SweepState, list[Config]]]:
    """A sweep whose directory exists, its record, and the config of each job; locked within the context.

    Of a search there are no configs: `Searching` adds its jobs to the record.

    Raises ConfigError for the directory of another sweep, program or process, StorageError for one that
    cannot be written.
    """
    is_grid, directory = configs[0].sweep.name == GRID, directory_of(request, configs)
    jobs = jobs_of(request) if is_grid else []
    if not (directory / SWEEP).exists():
        refuse_foreign(directory)  # before the lock, which is a file in it
    again = f" and continue it: -m {directory_override(RESUME, directory)}"
    with _writing(directory, again), locked(directory, DIRECTORY):
        clear_away(directory)
        of_jobs = [place(config, directory, job) for config, job in zip(configs, jobs, strict=is_grid)]
        record = _record(request, directory, jobs, configs[0].sweep.resume)
        for job, config in zip(record.jobs, of_jobs, strict=is_grid):
            Path(config.run.dir).mkdir(exist_ok=True)
            write_job(config, job.overrides)
        yield directory, record, of_jobs


def _writing(directory: Path, again: str = "") -> AbstractContextManager[None]:
    problem = f"the sweep's files cannot be written to {directory}"
    advice = f"Choose a writable place with {DIRECTORY}=DIR, or make room there{again}."
    return failing_as_storage_error(problem, advice)


def jobs_of(request: Request) -> list[SweepJob]:
    """The jobs of a grid."""
    space = space_of(request.overrides)
    return [
        SweepJob(number, job_name(space, number, lines), lines) for number, lines in enumerate(space.grid())
    ]


def job_name(space: Space, number: int, overrides: Sequence[str]) -> str:
    """The folder of one job: its number and distinguishing overrides, in shell-safe characters."""
    swept = {each.key for each in space.dimensions}
    own = ",".join(sorted(line for line in overrides if line.partition("=")[0] in swept))
    plain = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", own)
    return f"{number}_{plain}"[:NAME_LENGTH].rstrip("_")


def place(config: Config, directory: Path, job: SweepJob) -> Config:
    """The config with what a job has of its sweep: directory, tracking group unless it has another, name."""
    run = dataclasses.replace(config.run, dir=str(directory / job.name))
    tracker = dataclasses.replace(config.tracker, group=config.tracker.group or directory.name)
    own = dataclasses.replace(config, run=run, tracker=tracker)
    return in_sweep(with_environment(own, job.overrides, os.environ), job.name, job.number)


def _record(request: Request, directory: Path, jobs: Sequence[SweepJob], resume: str) -> SweepState:
    """The record of a new sweep, or of the one in the directory, ready to continue."""
    if (directory / SWEEP).exists():
        if resume == NEVER:
            problem = f"{directory} already holds a sweep, and {RESUME}={NEVER}"
            others = f"leave {DIRECTORY} out for a new one, or continue it: {RESUME}={AUTO}"
            raise ConfigError(f"{problem}. Choose another directory, {others}.")
        record = SweepState.read(directory)
        refuse_another_sweep(record, directory, request.overrides)
        recover(record, directory)
        record.write(directory)
        return record
    record = _new_record(request, jobs)
    record.write(directory, durable=True)  # before any other file: without it the directory is foreign
    return record


def refuse_another_sweep(record: SweepState, directory: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError unless the sweep in this directory has these overrides, but for `NO_RESULT`."""
    there, here = (
        {
            line
            for line in lines
            if line.startswith("sweep=") or re.split("[.=]", line, maxsplit=1)[0] not in NO_RESULT
        }
        for lines in (record.overrides, overrides)
    )
    found = [f"{line} is there and not here" for line in sorted(there - here)]
    found += [f"{line} is here and not there" for line in sorted(here - there)]
    if found:
        again = f"To continue that one, give no other words: -m {directory_override(RESUME, directory)}"
        other = f"For this one, choose another directory with {DIRECTORY}=DIR"
        differences = listed(found, SHOWN, "; ")
        raise ConfigError(f"{directory} holds another sweep. {again}. {other}. What differs: {differences}.")


def _new_record(request: Request, jobs: Sequence[SweepJob]) -> SweepState:
    tree = None if request.config_dir is None else str(request.config_dir.absolute())
    own = [line for line in request.overrides if not line.startswith((f"{DIRECTORY}=", f"{RESUME}="))]
    return SweepState(jobs, own, tree)


def directory_of(request: Request, configs: Sequence[Config]) -> Path:
    """The directory of a sweep, which exists: that of the sweep to resume, the one given, or a new one.

    Raises ConfigError where there is no sweep to resume, StorageError where it cannot be made.
    """
    if (directory := _to_resume(configs[0].sweep.resume)) is not None:
        if not (directory / SWEEP).is_file():
            raise ConfigError(f"{RESUME}={directory}: holds no sweep. Give the directory of one.")
        return directory
    given = request.value_of(DIRECTORY)
    if given is not None:
        try:
            path = OmegaConf.create({**to_dict(configs[0]), DIRECTORY: given})[
                DIRECTORY
            ]  # with its references
        except OmegaConfBaseException as error:
            raise ConfigError(f"{DIRECTORY}={given}: {first_line(error)}.") from error
        directory = Path(os.path.expanduser(str(path))).absolute()
        with _writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        return directory
    recipes = {config.recipe.name for config in configs}
    root = (ROOT / (recipes.pop() if len(recipes) == 1 else "several")).absolute()
    with _writing(root):
        return new_directory(root)


def is_setting(key: str) -> bool:
    """Whether a key, or a line that begins with it, is of the sweep and not of its jobs."""
    return re.match(r"sweep[.=]|sweep$", key) is not None


def _to_resume(value: object) -> Path | None:
    """The directory that sweep.resume has; None for auto, never, or none given."""
    if not isinstance(value, str) or value in (AUTO, NEVER):
        return None
    return Path(os.path.expanduser(value)).absolute()
