"""Kinds of rules for the values of keys, and the types with a rule that the fields of several modules have.

A type and its rule are one thing: `Annotated[int, whole(1)]`. `rule_of` gives the rule of any field's type.
Pure; which key has which type is in `schema` and `optimizers`, relations between keys are in `validation`.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from launcher.config.messages import nearest, show, suggestion

SCHEDULES = ("constant", "linear", "cosine", "onecycle")
TRACKERS = ("wandb", "tensorboard", "mlflow", "none")
OUTLIER_WINDOW = 128  # precision.outlier_window, by default


@dataclass(frozen=True)
class Rule:
    """`text` completes "must be ..."; `nearest` gives valid values like one that is not."""

    text: str
    holds: Callable[[Any], bool]
    nearest: Callable[[Any], Sequence[object]] = lambda value: ()


def value_problem(path: str, value: object, rule: Rule) -> str:
    typed = show(value)
    is_text = isinstance(value, int | float) and rule.holds(typed)  # a number or a truth value, unless quoted
    hint = f" To give {typed} as text: '{path}=\"{typed}\"'." if is_text else ""
    return f"{path}={typed}: must be {rule.text}.{suggestion(map(show, rule.nearest(value)))}{hint}"


def rule_of(kind: object) -> Rule:
    """The rule of a field's type. A union accepts what any of its members accepts."""
    members = get_args(kind)
    if get_origin(kind) is Annotated:
        rule = members[1]
        assert isinstance(rule, Rule)
        return rule
    if get_origin(kind) is Literal:
        return one_of(*members)
    if get_origin(kind) in (Union, types.UnionType):
        null_first = sorted(members, key=lambda member: member is not types.NoneType)
        return either(*map(rule_of, null_first))
    return {bool: flag, types.NoneType: null}[kind]


def either(*rules: Rule) -> Rule:
    return Rule(
        " or ".join(rule.text for rule in rules),
        lambda value: any(rule.holds(value) for rule in rules),
        lambda value: [near for rule in rules for near in rule.nearest(value)],
    )


def one_of(*choices: str) -> Rule:
    text = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    return Rule(text, lambda value: value in choices, lambda value: nearest(show(value), choices))


def is_number(value: object) -> bool:
    """Whether the value is a finite number within the range of a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Works for any int; isfinite would convert it first.
    return -sys.float_info.max <= value <= sys.float_info.max


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole(low: int, high: int = 2**53) -> Rule:
    return Rule(
        f"a whole number of at least {low}",
        lambda value: is_whole(value) and low <= value <= high,
    )


def number(text: str, holds: Callable[[float], bool]) -> Rule:
    return Rule(f"a number {text}", lambda value: is_number(value) and holds(value))


def power_of_two(high: int) -> Rule:
    return Rule(
        f"a power of two up to 2**{high.bit_length() - 1}",
        lambda value: is_whole(value) and 0 < value <= high and value & (value - 1) == 0,
    )


def string(text: str, holds: Callable[[str], bool]) -> Rule:
    return Rule(text, lambda value: isinstance(value, str) and holds(value))


def matching(text: str, pattern: str) -> Rule:
    return string(text, lambda value: re.fullmatch(pattern, value) is not None)


def list_of(rule: Rule, text: str) -> Rule:
    return Rule(text, lambda value: isinstance(value, list | tuple) and all(map(rule.holds, value)))


null = Rule("null", lambda value: value is None)
flag = Rule("true or false", lambda value: isinstance(value, bool))
name = matching(
    "a name of letters, digits, '.', '_' and '-' that begins with a letter or digit",
    r"[A-Za-z0-9][A-Za-z0-9._-]*",
)
text = string("a string without NUL characters", lambda value: value.strip() != "" and "\0" not in value)
share = number("from 0 to below 1", lambda value: 0 <= value < 1)
names = list_of(name, "a list of names")
shares = list_of(number("above 0", lambda value: value > 0), "a list of numbers above 0, one for each rank")
trackers = Rule(  # other names than these are checked where recipe files are known
    f"one of {', '.join(TRACKERS)}, or a list of different ones without none",
    lambda value: name.holds(value) or (names.holds(value) and len(value) == len({*value} - {"none"}) > 0),
)

Name = Annotated[str, name]
Share = Annotated[float, share]
Positive = Annotated[float, number("above 0", lambda value: value > 0)]
NotNegative = Annotated[float, number("of at least 0", lambda value: value >= 0)]
Rate = Annotated[float, number("above 0 and at most 1e30", lambda value: 0 < value <= 1e30)]  # fp32's range
