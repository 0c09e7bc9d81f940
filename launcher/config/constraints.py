"""What the values of keys must be, and the types with a constraint that the fields of several modules have.

A type and its constraint are one thing: `Annotated[int, whole(1)]`. `constraint_of` gives that of any type.
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
class Constraint:
    """`text` completes "must be ..."; `nearest` gives valid values like one that is not."""

    text: str
    is_valid: Callable[[Any], bool]
    nearest: Callable[[Any], Sequence[object]] = lambda value: ()


def value_problem(path: str, value: object, constraint: Constraint) -> str:
    typed = show(value)
    # A number or a truth value, unless quoted.
    is_text = isinstance(value, int | float) and constraint.is_valid(typed)
    hint = f" To give {typed} as text: '{path}=\"{typed}\"'." if is_text else ""
    near = suggestion(map(show, constraint.nearest(value)))
    return f"{path}={typed}: must be {constraint.text}.{near}{hint}"


def constraint_of(kind: object) -> Constraint:
    """The constraint of a field's type. A union accepts what any of its members accepts."""
    members = get_args(kind)
    if get_origin(kind) is Annotated:
        constraint = members[1]
        assert isinstance(constraint, Constraint)
        return constraint
    if get_origin(kind) is Literal:
        return one_of(*members)
    if get_origin(kind) in (Union, types.UnionType):
        null_first = sorted(members, key=lambda member: member is not types.NoneType)
        return either(*map(constraint_of, null_first))
    return {bool: flag, types.NoneType: null}[kind]


def either(*constraints: Constraint) -> Constraint:
    return Constraint(
        " or ".join(each.text for each in constraints),
        lambda value: any(each.is_valid(value) for each in constraints),
        lambda value: [near for each in constraints for near in each.nearest(value)],
    )


def one_of(*choices: str) -> Constraint:
    text = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    return Constraint(text, lambda value: value in choices, lambda value: nearest(show(value), choices))


def is_number(value: object) -> bool:
    """Whether the value is a finite number within the range of a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Works for any int; isfinite would convert it first.
    return -sys.float_info.max <= value <= sys.float_info.max


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole(low: int, high: int = 2**53) -> Constraint:
    return Constraint(
        f"a whole number of at least {low}",
        lambda value: is_whole(value) and low <= value <= high,
    )


def number(text: str, is_valid: Callable[[float], bool]) -> Constraint:
    return Constraint(f"a number {text}", lambda value: is_number(value) and is_valid(value))


def power_of_two(high: int) -> Constraint:
    return Constraint(
        f"a power of two up to 2**{high.bit_length() - 1}",
        lambda value: is_whole(value) and 0 < value <= high and value & (value - 1) == 0,
    )


def string(text: str, is_valid: Callable[[str], bool]) -> Constraint:
    return Constraint(text, lambda value: isinstance(value, str) and is_valid(value))


def matching(text: str, pattern: str) -> Constraint:
    return string(text, lambda value: re.fullmatch(pattern, value) is not None)


def list_of(each: Constraint, text: str) -> Constraint:
    return Constraint(text, lambda value: isinstance(value, list | tuple) and all(map(each.is_valid, value)))


null = Constraint("null", lambda value: value is None)
flag = Constraint("true or false", lambda value: isinstance(value, bool))
name = matching(
    "a name of letters, digits, '.', '_' and '-' that begins with a letter or digit",
    r"[A-Za-z0-9][A-Za-z0-9._-]*",
)
text = string("a string without NUL characters", lambda value: value.strip() != "" and "\0" not in value)
share = number("from 0 to below 1", lambda value: 0 <= value < 1)
names = list_of(name, "a list of names")
shares = list_of(number("above 0", lambda value: value > 0), "a list of numbers above 0, one for each rank")
trackers = Constraint(  # other names than these are checked where recipe files are known
    f"one of {', '.join(TRACKERS)}, or a list of different ones without none",
    lambda value: (
        name.is_valid(value) or (names.is_valid(value) and len(value) == len({*value} - {"none"}) > 0)
    ),
)

Name = Annotated[str, name]
Share = Annotated[float, share]
Positive = Annotated[float, number("above 0", lambda value: value > 0)]
NotNegative = Annotated[float, number("of at least 0", lambda value: value >= 0)]
Rate = Annotated[float, number("above 0 and at most 1e30", lambda value: 0 < value <= 1e30)]  # fp32's range
