"""Checks of a model's options, whose values come from the config unchecked, for recipes to call."""

from __future__ import annotations

from typing import Any

from launcher.errors import ConfigError


def require_counts(**options: Any) -> None:
    """Raise ConfigError unless each option of the model, by name, is a whole number of at least 1."""
    for name, value in options.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"model.{name}={value!r} must be a whole number of at least 1.")


def require_heads(width: Any, heads: Any) -> None:
    """Raise ConfigError unless both are whole numbers and the width divides by the number of heads."""
    require_counts(heads=heads, width=width)
    if width % heads:
        raise ConfigError(f"model.width={width} does not divide by model.heads={heads}.")


def require_dropout(value: Any) -> None:
    """Raise ConfigError unless the option `dropout` is a number of at least 0 and below 1."""
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ConfigError(f"model.dropout={value!r} must be a number from 0 to below 1.")
