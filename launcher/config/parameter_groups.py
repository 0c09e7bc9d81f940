"""The value of optim.groups: a list of mappings, each with patterns of parameter names.

Owns what a group may hold, with one message per mistake. Which parameters a pattern matches is known once
there is a model. Pure; imports neither torch nor Hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.config.messages import nearest, show, suggestion
from launcher.config.rules import Rule, flag, not_negative, optional, text, texts

KEY = "optim.groups"
EXAMPLE = '[{match:"*.bias",weight_decay:0}]'
patterns = Rule(
    'a pattern of parameter names such as "*.bias", or a list of patterns',
    lambda value: text.holds(value) or (texts.holds(value) and len(value) > 0),
)
RULES = {"match": patterns, "lr_scale": not_negative, "weight_decay": optional(not_negative), "frozen": flag}
DEFAULTS = {"lr_scale": 1.0, "weight_decay": None, "frozen": False}  # a group has to have the other


def problems(value: Any) -> Iterator[str]:
    """One line per mistake in the value of optim.groups; none for a valid one."""
    if not isinstance(value, list | tuple):
        yield f"{KEY}={show(value)}: must be a list of groups, for example {EXAMPLE}."
        return
    for number, group in enumerate(value):
        path = f"{KEY}[{number}]"
        if not isinstance(group, Mapping):
            yield f"{path}={show(group)}: must be a mapping with the keys {', '.join(RULES)}."
            continue
        for key, item in group.items():
            if key not in RULES:
                near = suggestion(nearest(str(key), RULES))
                yield f"{path}.{key}: there is no such key.{near} A group has {', '.join(RULES)}."
            elif not RULES[key].holds(item):
                yield f"{path}.{key}={show(item)}: must be {RULES[key].text}."
        if "match" not in group:
            yield f"{path}: the key match is missing: patterns of parameter names, for example {EXAMPLE}."


def completed(value: Any) -> list[dict[str, Any]]:
    """A valid value with all keys in each group, and patterns as lists."""
    return [
        {**DEFAULTS, **group, "match": [match] if isinstance(match := group["match"], str) else list(match)}
        for group in value
    ]
