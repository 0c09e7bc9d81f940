"""Experiments: named sweeps. A YAML file in conf/experiment lists the values of each swept key.

Owns the translation of `experiment=<name>` into the overrides that a user would have typed. All else that the
file sets is ordinary config. The command line overrides both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.config.composition import SWEEP, Request, quoted
from launcher.config.groups import choice_file, choice_values, group_choices
from launcher.config.messages import as_typed, show
from launcher.errors import ConfigError

GROUP = "experiment"


def with_experiment(request: Request) -> Request:
    """The request expanded to the sweep of its experiment; unchanged without an experiment.

    A key given by the user keeps the user's values.
    """
    name = chosen(request.overrides)
    if name is None or name not in group_choices(*request.directories).get(GROUP, ()):
        return request  # an unknown name is reported together with all other problems
    sweep = choice_values(request.directories, GROUP, name).get(SWEEP)
    if not isinstance(sweep, Mapping) or not sweep:
        file = choice_file(request.directories, GROUP, name)
        raise ConfigError(f"{file}: has no `{SWEEP}:` section with a list of values for each key.")
    given = {line.partition("=")[0] for line in request.overrides}
    added = [line for key, line in lines_of(name, sweep) if key not in given]
    return dataclasses.replace(request, overrides=(*request.overrides, *added), multirun=True)


def chosen(overrides: Sequence[str]) -> str | None:
    """The name in the last `experiment=<name>`, None without one or with null."""
    names = [line.partition("=")[2] for line in overrides if line.startswith(f"{GROUP}=")]
    return names[-1] if names and names[-1] != "null" else None


def lines_of(name: str, sweep: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and override line of each swept key; a key with one value is swept as well."""
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{GROUP}={name}: `{SWEEP}.{key}` is {show(values)}; it must be a list of values."
            )
        yield key, f"{key}={','.join(map(written, values))}"


def written(value: Any) -> str:
    """A value in Hydra's grammar."""
    return quoted(value) if isinstance(value, str) and not value.isidentifier() else as_typed(value)
