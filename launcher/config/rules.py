"""Kinds of rules for the values of keys, and the named types that schema.py gives to its fields.

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
from launcher.config.trees import nested

SCHEDULES = ("constant", "linear", "cosine", "onecycle")
TRACKERS = ("wandb", "tensorboard", "trackio", "none")
BLOCKS = "blocks"  # train.compile: each repeated block instead of the whole model


@dataclass(frozen=True)
class Rule:
    """`text` completes "must be ..."; `nearest` gives valid values like one that is not."""

    text: str
    holds: Callable[[Any], bool]
    nearest: Callable[[Any], Sequence[Any]] = lambda value: ()


def value_problem(path: str, value: Any, rule: Rule) -> str:
    return f"{path}={show(value)}: must be {rule.text}.{suggestion(map(show, rule.nearest(value)))}"


def rule_of(kind: Any) -> Rule:
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
    return Rule(
        f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0],
        lambda value: isinstance(value, str) and value in choices,
        lambda value: nearest(show(value), choices),
    )


def is_number(value: Any) -> bool:
    """Whether the value is a finite number within the range of a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Works for any int; isfinite would convert it first.
    return -sys.float_info.max <= value <= sys.float_info.max


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole(low: int, high: int = 2**53) -> Rule:
    return Rule(
        f"a whole number of at least {low}",
        lambda value: is_whole(value) and low <= value <= high,
        lambda value: (high,) if is_whole(value) and value > high else (),
    )


def number(text: str, holds: Callable[[float], bool]) -> Rule:
    return Rule(f"a number {text}", lambda value: is_number(value) and holds(value))


def power_of_two(high: int) -> Rule:
    return Rule(
        f"a power of two up to 2**{high.bit_length() - 1}",
        lambda value: is_whole(value) and 0 < value <= high and value & (value - 1) == 0,
        lambda value: [power for power in _surrounding_powers(value) if power <= high] or [high],
    )


def _surrounding_powers(value: Any) -> Sequence[int]:
    if not (is_whole(value) or is_number(value)) or value < 1:
        return (1,)
    below = 1 << int(value).bit_length() - 1
    return (below, 2 * below)


def string(text: str, holds: Callable[[str], bool]) -> Rule:
    return Rule(text, lambda value: isinstance(value, str) and holds(value))


def list_of(rule: Rule, text: str) -> Rule:
    return Rule(text, lambda value: isinstance(value, list | tuple) and all(map(rule.holds, value)))


def _has_giant(value: Any) -> bool:
    """Whether the value holds, at any depth, a whole number beyond the range of a float."""
    return any(is_whole(each) and not is_number(each) for each in nested(value))


null = Rule("null", lambda value: value is None)
flag = Rule("true or false", lambda value: isinstance(value, bool))
name = string(
    "a name of letters, digits, '.', '_' and '-' that begins with a letter or digit",
    lambda value: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is not None,
)
text = string("a string without NUL characters", lambda value: value.strip() != "" and "\0" not in value)
share = number("from 0 to below 1", lambda value: 0 <= value < 1)
trackers = Rule(
    f"one of {', '.join(TRACKERS)}, or a list of different ones without none",
    lambda value: (
        name.holds(value)  # other names than these are checked where recipe files are known
        or (
            isinstance(value, list | tuple)
            and len(value) == len({*map(str, value)}) > 0
            and "none" not in value
            and all(map(name.holds, value))
        )
    ),
)

Auto = Literal["auto"]
Name = Annotated[str, name]
Text = Annotated[str, text]
Texts = Annotated[tuple[str, ...], list_of(text, "a list of strings")]
Sha256 = Annotated[
    str,
    string(
        "a SHA-256 of 64 hexadecimal digits", lambda value: re.fullmatch(r"[0-9a-f]{64}", value) is not None
    ),
]
WandbName = Annotated[
    str,
    string(
        "a string of at most 128 characters without / \\ # ? % : and spaces around it",
        lambda value: 0 < len(value) <= 128 and value == value.strip() and not set(value) & set("/\\#?%:\0"),
    ),
]
Trackers = Annotated[str | list[str], trackers]
Options = Annotated[
    dict[str, Any],
    Rule(
        "a section with whole numbers below 2**1024",  # int to text is limited to 4,300 digits
        lambda value: (
            isinstance(value, dict) and all(isinstance(key, str) for key in value) and not _has_giant(value)
        ),
    ),
]
Count = Annotated[int, whole(1)]
CountOrZero = Annotated[int, whole(0)]
Endpoint = Annotated[str, string("HOST:PORT", lambda value: re.fullmatch(r"\S+:\d{1,5}", value) is not None)]
Share = Annotated[float, share]
Positive = Annotated[float, number("above 0", lambda value: value > 0)]
NotNegative = Annotated[float, number("of at least 0", lambda value: value >= 0)]
Rate = Annotated[float, number("above 0 and at most 1e30", lambda value: 0 < value <= 1e30)]  # fp32's range
# Timers cannot wait longer than 1e9 s.
Seconds = Annotated[float, number("above 0 and at most 1e9", lambda value: 0 < value <= 1e9)]
LossScale = Annotated[int, power_of_two(2**127)]  # the largest in fp32
Predivide = Annotated[int, power_of_two(2**16)]  # more would round even the largest fp16 gradients to zero
