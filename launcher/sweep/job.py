"""One job of a sweep: what runs, how far it is, and the file from which any process can start it.

Owns `job.json` in the job's folder: the resolved config, with the names of environment variables in place of
their values, and the overrides. `python -m launcher job DIR` runs it. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.config.messages import as_typed
from launcher.config.schema import Config
from launcher.errors import ConfigError
from launcher.run_dir.atomic import read_json, write_json
from launcher.run_dir.records import CONFIG, JOB, user_shape

WAITING, RUNNING = "waiting", "running"
DONE, FAILED, STOPPED, PRUNED = "done", "failed", "stopped", "pruned"  # stopped: on request, and saved
OVER = (DONE, FAILED, PRUNED)  # which a sweep that continues does not run again


@dataclass
class Job:
    """A job as `sweep.json` records it. A carrier may set `devices` and `handle`, and nothing else."""

    number: int  # from 0; never changes
    name: str  # of its folder in that of the sweep
    overrides: Sequence[str]
    nproc: int = 1  # workers, each with a GPU where there are any
    state: str = WAITING
    attempts: int = 0  # started so far
    failures: int = 0  # of these; a sweep that continues counts again from 0
    devices: Sequence[str] = ()  # of the latest attempt: UUIDs of GPUs, or cores; as the carrier names them
    exit: int | None = None  # of the latest attempt
    error: str | None = None  # its reason, in one line
    metric_name: str | None = None
    metric: float | None = None  # of the result, or of the evaluation by which it was pruned
    higher_is_better: bool | None = None  # of that metric; None before there is one
    started: float | None = None  # the latest attempt, in unix seconds
    seconds: float = 0.0  # of all attempts that have ended
    device_seconds: float = 0.0  # the same times nproc
    handle: str | None = None  # by which a carrier finds a job that outlives the sweep's process


def write_job(config: Config, overrides: Sequence[str]) -> None:
    """Write job.json to the folder `config.run.dir`, which exists. Raises OSError."""
    recorded = {"config": user_shape(config), "from_environment": config.from_environment}
    write_json(Path(config.run.dir) / JOB, {"overrides": list(overrides), **recorded})


def read_job(directory: Path) -> tuple[Config, tuple[str, ...]]:
    """Config and overrides of the job in this folder, which may have moved; variables have today's values.

    Raises ConfigError for a folder without a job, for a job of another version, and for a missing variable.
    """
    from launcher.config.environment_values import interpolated, refuse_missing, typed
    from launcher.config.trees import replaced
    from launcher.config.validation import parse

    if not os.path.lexists(directory / JOB):
        raise ConfigError(f"{directory}: {_instead_of_a_job(directory)} Give the folder of a job of a sweep.")
    try:
        record = read_json(directory / JOB)
        tree, recorded, overrides = (record[key] for key in ("config", "from_environment", "overrides"))
        refuse_missing(recorded)
        values = {path: typed(path, interpolated(path, text), text) for path, text in recorded.items()}
        config = parse(replaced(tree, values), recorded)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{directory}: holds no {JOB} that this version can read ({error}). Give the folder of a job of "
            "a sweep."
        ) from error
    placed = replace(config, run=replace(config.run, dir=str(directory.absolute())))
    return placed, tuple(map(str, overrides))


def _instead_of_a_job(directory: Path) -> str:
    """What a folder without a job.json is, in a sentence."""
    if not directory.is_dir():
        return "there is no such folder."
    if (directory / CONFIG).exists():
        return "this is a run, and no job of a sweep; to resume it, give its command with run.dir=DIR."
    return f"this folder holds no {JOB}."


def differences(directory: Path, config: Config) -> list[str]:
    """What differs between job.json and `config`, and matters to a result. Raises ConfigError.

    What a run learns from matters, with the number of epochs and steps, and of workers.
    """
    from launcher.config.trees import leaves

    there, here = (dict(leaves(_that_matters(each))) for each in (read_job(directory)[0], config))
    return [
        f"{key} is {as_typed(there.get(key))} there and {as_typed(here.get(key))} here"
        for key in dict.fromkeys((*there, *here))
        if there.get(key) != here.get(key)
    ]


NOT_LEARNED_FROM = ("run", "sweep", "tracker", "telemetry", "checkpoint", "consistency", "recipes")


def _that_matters(config: Config) -> dict[str, Any]:
    shape = {key: value for key, value in user_shape(config).items() if key not in NOT_LEARNED_FROM}
    return shape | {"launch": {"nproc": shape["launch"]["nproc"]}}
