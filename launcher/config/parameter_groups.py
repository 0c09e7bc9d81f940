"""The value of optim.groups: a list of mappings, each with patterns of parameter names.

Owns what a group may hold, with one message per mistake. Which parameters a pattern matches is known once
there is a model. Pure; imports neither torch nor Hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from launcher.config.messages import nearest, show, suggestion
from launcher.config.rules import NotNegative, Rule, either, list_of, rule_of, text, value_problem

KEY = "optim.groups"
EXAMPLE = '[{match:"*.bias",weight_decay:0}]'
Patterns = Annotated[
    tuple[str, ...],
    Rule(
        'a pattern of parameter names such as "*.bias", or a list of patterns',
        lambda value: value != [] and either(text, list_of(text, "a list of strings")).holds(value),
    ),
]


@dataclass(frozen=True)
class GroupConfig:
    """Parameters with rates of their own; the first group that matches a parameter has it."""

    match: Patterns
    lr_scale: NotNegative = 1.0
    weight_decay: NotNegative | None = None
    frozen: bool = False


@cache
def rules() -> Mapping[str, Rule]:
    return {key: rule_of(kind) for key, kind in get_type_hints(GroupConfig, include_extras=True).items()}


def problems(value: object) -> Iterator[str]:
    """One line per mistake in the value of optim.groups; none for a valid one."""
    if not isinstance(value, list | tuple):
        yield f"{KEY}={show(value)}: must be a list of groups, for example {EXAMPLE}."
        return
    for number, group in enumerate(value):
        path = f"{KEY}[{number}]"
        if not isinstance(group, Mapping):
            yield f"{path}={show(group)}: must be a mapping with the keys {', '.join(rules())}."
            continue
        for key, item in group.items():
            if key not in rules():
                near = suggestion(nearest(str(key), rules()))
                yield f"{path}.{key}: there is no such key.{near} A group has {', '.join(rules())}."
            elif not rules()[key].holds(item):
                yield value_problem(f"{path}.{key}", item, rules()[key])
        if "match" not in group:
            yield f"{path}: the key match is missing: patterns of parameter names, for example {EXAMPLE}."


def completed(value: Any) -> list[dict[str, Any]]:
    """A valid value with all keys in each group, and patterns as lists."""
    defaults = {each.name: each.default for each in fields(GroupConfig) if each.default is not MISSING}
    return [
        {**defaults, **group, "match": [match] if isinstance(match := group["match"], str) else list(match)}
        for group in value
    ]
