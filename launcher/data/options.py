"""The keys of `data` that a data set has beside those of all sets: their defaults, and what they may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.config.messages import nearest, suggestion
from launcher.config.rules import Rule, string
from launcher.config.schema import DataConfig
from launcher.errors import ConfigError

filled = string("a text", lambda value: value.strip() != "")
cache = "auto", Rule("none, auto, or a folder", filled.holds)  # data.cache of every set that has one
Known = Mapping[str, tuple[Any, Rule]]  # by key: the default, and the rule of a value


def options_of(config: DataConfig, known: Known) -> dict[str, Any]:
    """The options of a data set: the defaults updated by the config. Raises ConfigError for invalid ones."""
    values = {name: default for name, (default, _) in known.items()} | config.options
    for name, value in values.items():
        if name not in known:
            others = f"It has {', '.join(known)}." if known else "It has no options."
            raise ConfigError(
                f"data.{name} is not an option of data={config.name}.{suggestion(nearest(name, known))} "
                f"{others}"
            )
        if not known[name][1].holds(value):
            # As Python writes it: a number in quotes is a text.
            raise ConfigError(f"data.{name}={value!r}: must be {known[name][1].text}.")
    return values
