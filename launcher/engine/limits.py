"""Validation rules for the numbers that the engine receives from a config or a user's training loop.

Owns the rules and the error that they raise. `launcher.config.constraints` applies the same rules
to config keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from launcher.engine.errors import UnusableError

LARGEST_RATE = 1e30  # a step computes in fp32, whose largest number is 3.4e38
LARGEST_SCALE = 2**127  # the largest power of two of fp32
LARGEST_PREDIVIDE = 2**16  # an arbitrary limit far beyond 2^ceil(log2(W) / 2)
LARGEST_COUNT = 2**53  # up to it fp64 holds every int: a device keeps its counters so
VOTES = 10  # questions on which ranks can vote in a step; the caller defines their meaning


@dataclass(frozen=True)
class ArgumentRule:
    """`text` completes "it must be ..."."""

    text: str
    is_valid: Callable[[Any], bool]

    def require(self, name: str, value: object) -> None:
        """Raise UnusableError unless `value`, given as `name`, satisfies this rule."""
        if not self.is_valid(value):
            raise UnusableError(f"{name}={value!r}: it must be {self.text}.")


def is_number(value: object) -> bool:
    """Whether `value` is a finite number, and neither bool nor tensor."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Whether `value` is an int. 65536.0 is not, so that a limit is never rounded."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_fields(owner: object, prefix: str = "") -> None:
    """Raise UnusableError for the first field of a dataclass that breaks the rule of its type.

    That is the rule that `Annotated` gives it, the choices of a Literal, or True and False of a bool. None is
    allowed where the type has it. `prefix` comes before the field's name in the error.
    """
    for name, kind in get_type_hints(type(owner), include_extras=True).items():
        value, members = getattr(owner, name), [kind]
        if get_origin(kind) in (Union, UnionType):
            members = [member for member in get_args(kind) if member is not NoneType]
            if value is None and len(members) < len(get_args(kind)):
                continue
        if rule := _rule_of(members[0]):
            rule.require(f"{prefix} {name}".lstrip(), value)


def _rule_of(kind: object) -> ArgumentRule | None:
    if get_origin(kind) is Literal:
        return one_of(*get_args(kind))
    if kind is bool:
        return flag
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, ArgumentRule)), None)


def one_of(*choices: object) -> ArgumentRule:
    return ArgumentRule(f"one of {', '.join(map(str, choices))}", choices.__contains__)


def number(text: str, is_valid: Callable[[float], bool]) -> ArgumentRule:
    return ArgumentRule(f"a finite number {text}", lambda value: is_number(value) and is_valid(value))


def power_of_two(high: int) -> ArgumentRule:
    return ArgumentRule(
        f"a power of two from 1 to 2**{high.bit_length() - 1}, as an int",
        lambda value: is_whole(value) and 1 <= value <= high and value & (value - 1) == 0,
    )


positive = number("above 0", lambda value: value > 0)
not_negative = number("of at least 0", lambda value: value >= 0)
rate = number(f"of at least 0 and at most {LARGEST_RATE:g}", lambda value: 0 <= value <= LARGEST_RATE)
share = number("from 0 to below 1", lambda value: 0 <= value < 1)
at_least_one = ArgumentRule(
    f"an int from 1 to 2**{LARGEST_COUNT.bit_length() - 1}",
    lambda value: is_whole(value) and 1 <= value <= LARGEST_COUNT,
)
window = ArgumentRule(  # of fewer steps a standard deviation says little
    f"an int from 8 to 2**{LARGEST_COUNT.bit_length() - 1}",
    lambda value: is_whole(value) and 8 <= value <= LARGEST_COUNT,
)
two_shares = ArgumentRule(
    "two numbers from 0 to below 1",
    lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(map(share.is_valid, value)),
)
flag = ArgumentRule("True or False", lambda value: isinstance(value, bool))
loss_scale = power_of_two(LARGEST_SCALE)
predivide = power_of_two(LARGEST_PREDIVIDE)
a_reference_count = power_of_two(2**62)  # the largest power of two of int64, in which a state saves it
question = ArgumentRule(f"an int from 0 to {VOTES - 1}", lambda value: is_whole(value) and 0 <= value < VOTES)
