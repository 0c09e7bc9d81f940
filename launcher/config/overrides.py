"""What a user may override on the command line.

Owns the checks of single overrides against the known groups and keys before Hydra composes anything, and
their error messages. Refuses overrides that delete keys, and variables named like credentials.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override, ValueType

from launcher.config.messages import nearest, shortened, show, suggestion
from launcher.config.other_keys import PRECISIONS, REMOVED_KEYS, RENAMED_KEYS
from launcher.config.search_space import count_of, interval_problem

OWN_RECIPE = " A recipe of your own is chosen by its file: recipe={name}.py"
CALL = re.compile(r"\$\{[^{}]*oc\.env[^{}]*\}")
CREDENTIAL = re.compile(r"\w*(KEY|TOKEN|SECRET|PASSW|CREDENTIAL)\w*", re.IGNORECASE)
MOST_JOBS = 2_000  # of a sweep: composed and checked in about 20 seconds, and sweep.json stays below 2 MB
SWEEP_DIRECTORY = "hydra.sweep.dir"


def form_problem(override: Override, multirun: bool) -> str | None:
    """Problems independent of the tree: deletions, credentials, Hydra's own settings, sweeps."""
    if override.is_delete():
        reason: str | None = "keys cannot be deleted. Override the key with another value instead."
    else:
        reason = credential_problem(value_of(override)) or hydra_problem(override)
        reason = reason or sweep_problem(override, multirun)
    return f"{shortened(override.input_line or '')}: {reason}" if reason else None


def credential_problem(value: object) -> str | None:
    """The problem of a value, which may be nested, with a credential of the environment in it."""
    calls = (call for text in texts(value) for call in CALL.findall(text))
    if found := next(filter(None, map(CREDENTIAL.search, calls)), None):
        return f"{found[0]} is named like a credential, which no config may hold. Choose another variable."
    return None


def hydra_problem(override: Override) -> str | None:
    key = override.key_or_group
    if re.split("[./]", key)[0] != "hydra" or key == SWEEP_DIRECTORY:
        return None
    return (
        f"Hydra's own settings are not used here, but {SWEEP_DIRECTORY}. The directory of a run is "
        "run.dir=DIR, that of your own config files --config-dir DIR; sweep=random and sweep=tpe search, and "
        "sweep.launcher=slurm runs jobs on Slurm."
    )


def sweep_problem(override: Override, multirun: bool) -> str | None:
    key, varies = override.key_or_group, override.is_sweep_override()
    if multirun and key == "run.dir":
        return "each job of a sweep has its own directory. Set hydra.sweep.dir instead."
    if key == SWEEP_DIRECTORY or key.partition(".")[0] == "sweep":
        if not multirun and key not in REMOVED_KEYS | RENAMED_KEYS:  # these are gone with -m too
            for_a_run = ", or set run.dir for a single run" if key == SWEEP_DIRECTORY else ""
            return f"only a sweep has this setting. Add -m{for_a_run}."
        if varies:
            return "a setting of the whole sweep takes one value."
    if not varies:
        return None
    if CALL.search(override.input_line or ""):
        return "a swept value cannot be ${oc.env:...}, because it names the job."
    if not multirun:
        return "several values need a sweep. Add -m, or write a list as key=[a,b]."
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return "a sweep lists its values, without glob(): key=a,b."
    if not (number := count_of(override)):
        return "has no values."
    if number > MOST_JOBS:
        return too_many_jobs(number)
    return interval_problem(override)


def too_many_jobs(number: int) -> str:
    advice = "Give fewer values, or search: sweep=random or sweep=tpe with sweep.stop.max_trials=N."
    return f"{number:,} jobs: a sweep has at most {MOST_JOBS:,}. {advice}"


def choice_problem(group: str, choice: Any, choices: Sequence[str]) -> str | None:
    if isinstance(choice, str) and choice in choices:
        return None
    if group == "tracker" and isinstance(choice, list):
        return f"{group}={show(choice)}: several trackers are the list of a key: tracker.name={show(choice)}."
    near, name = nearest(show(choice), choices), show(choice)
    if group == "precision" and (here := PRECISIONS.get(name)):
        return f"{group}={name}: there is no such {group}. Write {group}={here}. All: {', '.join(choices)}."
    own = OWN_RECIPE.format(name=name) if group == "recipe" and not near else ""
    return f"{group}={name}: there is no such {group}.{suggestion(near)} All: {', '.join(choices)}.{own}"


def unknown_keys(key: str, value: object, known: Collection[str]) -> Iterator[tuple[str, object]]:
    """The keys of the override that the tree lacks, with their values; a value may be a section."""
    if key not in known:
        yield key, value
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from unknown_keys(f"{key}.{inner}", item, known)


def value_of(override: Override) -> Any:
    """The plain value; for a sweep, the list of its values, empty for a glob that matches no name."""
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return []
    if override.is_discrete_sweep() and count_of(override) <= MOST_JOBS:  # else it is refused
        return list(override.sweep_iterator())
    return None if override.is_sweep_override() else override.value()


def texts(value: object) -> Iterator[str]:
    """The strings at any depth of a value, without the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):  # a check for Mapping takes three times as long
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)
