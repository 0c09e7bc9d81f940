"""The keys of `data` that a data set has beside those of all sets: a dataclass with a field for each of them.

The type of a field has the constraint of its values, as in launcher.config.schema. Its default is
that of the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar, get_type_hints

from launcher.config.constraints import Constraint, constraint_of, string, whole
from launcher.config.messages import nearest, suggestion
from launcher.config.schema import DataConfig
from launcher.errors import ConfigError

Options = TypeVar("Options")

filled = string("a text", lambda value: value.strip() != "")
Text = Annotated[str, filled]
Count = Annotated[int, whole(1)]
# data.cache of every set that has one
Cache = Annotated[str, Constraint("none, auto, or a folder", filled.is_valid)]


@dataclass(frozen=True)
class NoOptions:
    """The options of a data set that has none."""


def options_of(config: DataConfig, kind: type[Options]) -> Options:
    """The options of a data set, an object of the dataclass `kind`. Raises ConfigError for invalid ones."""
    hints = get_type_hints(kind, include_extras=True)
    constraints = {name: constraint_of(hint) for name, hint in hints.items()}
    for name, value in config.options.items():
        if name not in constraints:
            others = f"It has {', '.join(constraints)}." if constraints else "It has no options."
            raise ConfigError(
                f"data.{name} is not an option of data={config.name}.{suggestion(nearest(name, hints))} "
                f"{others}"
            )
        if not constraints[name].is_valid(value):
            # As Python writes it: a number in quotes is a text.
            raise ConfigError(f"data.{name}={value!r}: must be {constraints[name].text}.")
    return kind(**config.options)


def refuse_path(config: DataConfig, reason: str) -> None:
    """Raise ConfigError where data.path is set for a set that has no files."""
    if config.path is not None:
        raise ConfigError(
            f"data.path={config.path} is set, but data={config.name} {reason} and reads no files. For a "
            "folder of photographs add data=imagefolder, for CIFAR-10 data=cifar10; else remove data.path."
        )
