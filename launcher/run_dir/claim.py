"""The directory of a run, claimed by one process at a time.

Owns its name and the decision whether the run in it is resumed, finished, or another run. Never overwrites
another run. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from launcher.config.codec import decoded
from launcher.config.schema import Config
from launcher.errors import ConfigError, counted, listed
from launcher.run_dir.atomic import failing_as_storage_error, read_json
from launcher.run_dir.differences import IDENTITY, differences
from launcher.run_dir.discarding import (
    DISCARDED,
    NEVER,
    discards_steps,
    is_restart,
    resume_after,
)
from launcher.run_dir.lock import locked
from launcher.run_dir.pruning import PRUNE
from launcher.run_dir.records import (
    CHECKPOINTS,
    RESULT,
    foreign_to_a_run,
    write_metadata,
)
from launcher.run_dir.result import Result
from launcher.run_dir.status import FILE_NAME, state_since

DEFAULT_ROOT = Path("outputs")
SHOWN = 8  # settings that differ
TO_BEGIN_ANEW = (
    "To start from the beginning there: the same command with checkpoint.resume=never, which sets the "
    "checkpoints aside."
)


@contextlib.contextmanager
def open_run_dir(config: Config, overrides: Sequence[str]) -> Iterator[tuple[Config, str]]:
    """Make or reopen the run's directory, describe the run in it, and lock it within the context.

    Yields the config with the directory's path, and what there is to say of a run that is already done; empty
    for one to run.

    Resumes a run of the same recipe, model, data and optimizer; `checkpoint.resume=never` begins anew. Raises
    ConfigError for the directory of another run and for one in use; StorageError for one that cannot be
    written.
    """
    with _writing(config):
        if config.run.dir:
            directory = Path(os.path.expanduser(config.run.dir)).absolute()
            if directory.exists() and not directory.is_dir():
                raise ConfigError(f"run.dir={directory} is a file. Give a new name, or a run's directory.")
            directory.mkdir(parents=True, exist_ok=True)
        else:
            directory = new_directory(DEFAULT_ROOT.absolute() / config.recipe.name)
        resolved = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(directory)))
        restarted = is_restart(os.environ)
        resume = resume_after(config.checkpoint.resume, directory, restarted)
        checkpoint = dataclasses.replace(config.checkpoint, resume=resume)
        resolved = dataclasses.replace(resolved, checkpoint=checkpoint)
        refuse_foreign(directory)
        lock = locked(directory)
    with lock:
        with _writing(config):
            finished = _finished(resolved, directory) if _holds_run(directory) else ""
            if not finished:
                # Of an earlier command, which ended there.
                for name in (PRUNE,) if restarted else (PRUNE, DISCARDED):
                    (directory / name).unlink(missing_ok=True)
                write_metadata(resolved, overrides)
        yield resolved, finished


def _writing(config: Config) -> AbstractContextManager[None]:
    """Raise a StorageError in place of an OSError."""
    place = Path(config.run.dir or DEFAULT_ROOT / config.recipe.name).expanduser().absolute()
    return failing_as_storage_error(
        f"The run's files cannot be written to {place}",
        "Choose a writable place with run.dir=DIR, or make room there.",
    )


def refuse_foreign(directory: Path) -> None:
    """Raise ConfigError for a directory with files of something else that a run would write over."""
    if not _holds_run(directory) and (foreign := foreign_to_a_run(directory)):
        raise ConfigError(
            f"run.dir={directory} holds no run, and files that one would write over: {listed(foreign, 3)}. "
            "Give a new name, or the directory of a run to resume."
        )


def _holds_run(directory: Path) -> bool:
    """Whether a run has written the status.json there, or a checkpoint: a full disk may cost the former."""
    return bool(state_since(directory / FILE_NAME, 0)) or any((directory / CHECKPOINTS).glob("*step-*"))


def _finished(config: Config, directory: Path) -> str:
    """The message for a run that is already done; empty for one that can be resumed.

    Raises ConfigError for another run, and for one that is done and was trained with other settings: this
    command would leave it as it is. Deletes the result.json of a run that begins anew or has trained nothing.
    """
    if config.checkpoint.resume == NEVER or not _has_trained(directory):
        (directory / RESULT).unlink(missing_ok=True)  # of the run that this one replaces
        return ""
    others = differences(config, directory)
    differing = listed([*others.values()], SHOWN, "; ")
    if others.keys() & set(IDENTITY):
        raise ConfigError(
            f"run.dir={directory} holds another run: {differing}. Give the overrides that it was "
            f"started with (its overrides.txt), or choose another directory. {TO_BEGIN_ANEW}"
        )
    if discards_steps(config.checkpoint.resume, directory):
        return ""  # resumes from an earlier checkpoint of the same run
    try:
        result = decoded(Result, read_json(directory / RESULT))
    except (OSError, ValueError):
        return ""
    steps = result.steps
    if result.state != "done" or steps is None or result.steps_per_epoch is None:
        return ""  # not done, or damaged: the run resumes from its last checkpoint and writes it again
    rule, stopped_early = dataclasses.asdict(config.early_stopping), result.stopped_early
    # Whether it has ended before its last step under the rule that this command gives.
    early = stopped_early is not None and all(stopped_early.get(key) == value for key, value in rule.items())
    if not early and steps < config.train.total_steps(result.steps_per_epoch):
        return ""
    metric = "" if result.metric is None else f": {result.metric_name} {result.metric}"
    limits = config.train.max_steps is not None and config.train.max_steps <= steps
    key = "early_stopping.patience" if early else "train.max_steps" if limits else "train.epochs"
    done = f"{directory}: the run is done, after {counted(steps, 'step')}{metric}."
    done = f"{done} To train longer, raise {key}. {TO_BEGIN_ANEW}"
    if others:
        raise ConfigError(
            f"{done} It was trained with other settings: {differing}. To train with those of this command, "
            "choose another directory."
        )
    return done


def _has_trained(directory: Path) -> bool:
    """Whether a run has left something to resume, also a damaged checkpoint, or a result."""
    if any((directory / CHECKPOINTS).glob("*step-*")):
        return True
    try:
        return decoded(Result, read_json(directory / RESULT)).state == "done"
    except (OSError, ValueError):
        return False


def new_directory(root: Path) -> Path:
    """Make a directory in `root` that is named after the time, and by chance. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        directory = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        with contextlib.suppress(FileExistsError):  # of another process, which has just taken it
            directory.mkdir()
            return directory
