"""Experiments: named overrides. A YAML file in conf/experiment sets values, and may list those of a sweep.

Owns the translation of the section `sweep` of `experiment=<name>` into the overrides that a user would have
typed, and of the names that a glob stands for. All else that the file sets is ordinary config, composed last.
The command line overrides both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from launcher.config.composition import SWEEP, Request
from launcher.config.groups import choice_file, choice_values, group_choices
from launcher.config.messages import literal, show
from launcher.config.schema import SweepConfig, types_of
from launcher.errors import ConfigError

GROUP = "experiment"


def with_experiment(request: Request) -> Request:
    """The request expanded to the sweep of its experiment, if that has one; globs become names.

    A key given by the user keeps the user's values.
    """
    request = without_globs(request)
    name = chosen(request.overrides)
    if name is None or name not in group_choices(*request.directories).get(GROUP, ()):
        return request  # an unknown name is reported together with all other problems
    values = choice_values(request.directories, GROUP, name)
    if SWEEP not in values:
        return request
    sweep = values[SWEEP]
    if isinstance(sweep, Mapping):  # the settings of the sweep are ordinary config
        settings = types_of(SweepConfig)
        if sweep and sweep.keys() <= settings.keys():
            return request
        sweep = {key: listed for key, listed in sweep.items() if key not in settings}
    if not isinstance(sweep, Mapping) or not sweep:
        file = choice_file(request.directories, GROUP, name)
        raise ConfigError(f"{file}: has a `{SWEEP}:` section that is no list of values for each key.")
    given = {line.partition("=")[0] for line in request.overrides}
    added = [line for key, line in lines_of(name, sweep) if key not in given]
    return dataclasses.replace(request, overrides=(*request.overrides, *added), multirun=True)


def without_globs(request: Request) -> Request:
    """The request with the names that match in place of a glob; unchanged without one."""
    if not any("glob(" in line for line in request.overrides):
        return request
    groups, lines = group_choices(*request.directories), list(request.overrides)
    for number, line in enumerate(lines):
        with contextlib.suppress(HydraException, ValueError, RecursionError):  # reported with other problems
            override = OverridesParser.create().parse_override(line)
            value, group = override.value(), override.key_or_group
            if isinstance(value, Glob) and (names := value.filter(groups.get(group, []))):
                lines[number] = f"{group}={','.join(names)}"
    return dataclasses.replace(request, overrides=tuple(lines))


def chosen(overrides: Sequence[str]) -> str | None:
    """The name in the last `experiment=<name>`, None without one or with null."""
    names = [line.partition("=")[2] for line in overrides if line.startswith(f"{GROUP}=")]
    return names[-1] if names and names[-1] != "null" else None


def lines_of(name: str, sweep: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Key and override line of each swept key; a key with one value is swept as well."""
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{GROUP}={name}: `{SWEEP}.{key}` is {show(values)}; it must be a list of values."
            )
        yield key, f"{key}={','.join(map(literal, values))}"
