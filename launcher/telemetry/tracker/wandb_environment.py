"""Applies wandb's own variables to the config of the tracker.

Owns the mapping of variables to keys of `tracker`, and their precedence: the command line, then the
environment, then the YAML. wandb reads all other WANDB_ variables itself (job type, resume, silence, console,
servers and caches): see `wandb_tracker`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config.schema import Config, constraints
from launcher.errors import ConfigError
from launcher.run_dir.claim import DEFAULT_ROOT
from launcher.telemetry.tracker.wandb_agent import sweep_of_agent

VARIABLES = {
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "run_name": "WANDB_NAME",
    "run_id": "WANDB_RUN_ID",
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
    "notes": "WANDB_NOTES",
}
MODES = ("WANDB_MODE", "WANDB_DISABLED")
OF_THE_AGENT = ("project", "entity", "run_id")  # in a sweep of wandb's it takes these from the variables only


def with_environment(config: Config, overrides: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The config with the variables' values for keys that the command line does not set.

    Raises ConfigError for a value that wandb would refuse.
    """
    fixed = OF_THE_AGENT if sweep_of_agent(environ) else ()
    free = {
        key: variable
        for key, variable in VARIABLES.items()
        if key in fixed or not _given(f"tracker.{key}", overrides)
    }
    changes: dict[str, Any] = {
        key: _value(key, variable, environ[variable])
        for key, variable in free.items()
        if environ.get(variable)
    }
    if any(environ.get(name) for name in MODES) and not _given("tracker.mode", overrides):
        changes["mode"] = "auto"  # decided by the variables
    return dataclasses.replace(config, tracker=dataclasses.replace(config.tracker, **changes))


def of_agent(config: Config, environ: Mapping[str, str]) -> Config:
    """The config of a run that wandb's agent has started, with a directory named after sweep and run.

    An agent that resumes a run of its sweep starts it with the same id, so that it finds its checkpoints.
    """
    sweep, run_id = sweep_of_agent(environ), environ.get("WANDB_RUN_ID")
    if config.run.dir or not (sweep and run_id):
        return config
    directory = DEFAULT_ROOT / config.recipe.name / f"{sweep}-{run_id}"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(directory)))


def in_sweep(config: Config, job: str, number: int) -> Config:
    """Make a run name or id unique for each job of a sweep; wandb would merge jobs with the same id."""
    tracker = config.tracker
    return dataclasses.replace(
        config,
        tracker=dataclasses.replace(
            tracker,
            run_name=tracker.run_name and f"{tracker.run_name}-{job}",
            run_id=tracker.run_id and f"{tracker.run_id}-{number}",
        ),
    )


def _given(key: str, overrides: Sequence[str]) -> bool:
    """Whether the command line sets the key."""
    return any(line.partition("=")[0] == key for line in overrides)


def _value(key: str, variable: str, text: str) -> Any:
    value = tuple(tag.strip() for tag in text.split(",") if tag.strip()) if key == "tags" else text
    constraint = constraints()[f"tracker.{key}"]
    if not constraint.is_valid(value):
        raise ConfigError(f"{variable}={text} in the environment: must be {constraint.text}.")
    return value
