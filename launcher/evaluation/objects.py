"""Objects as their parts: what Python's own protocol of copying takes them apart into.

Owns which objects can be taken apart without loss. Runs no code but that of the object's own class.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NEW_OBJECT = copyreg.__newobj__  # type: ignore[attr-defined]


class CannotPackError(TypeError):
    """A value that has no encoding. The text names its place within the whole, and its type."""

    def __init__(self, value: object, why: str = "") -> None:
        super().__init__()
        self.place: list[str] = []
        self.what = f"of the type {type(value).__module__}.{type(value).__qualname__}{why}"

    def __str__(self) -> str:
        place = "".join(self.place[:6]).lstrip(".") + ("..." if len(self.place) > 6 else "")
        return f"{place or 'the value'} is {self.what}"


@dataclass(frozen=True)
class Outline:
    """The class of an object, and a deep copy of its parts."""

    kind: type
    parts: Sequence[Any]

    @classmethod
    def of(cls, value: object) -> Outline:
        """Raises CannotPackError for a class with its own __reduce__, and what deepcopy raises."""
        parts = parts_of(value)
        if parts is None:
            raise CannotPackError(value, ", which has its own __reduce__")
        return cls(type(value), copy.deepcopy(parts))


def parts_of(value: object) -> list[Any] | None:
    """[arguments of __new__, state, items, pairs] of an object, by the protocol that `copy` uses as well.

    None for an object that consists of more, such as a function, or one with its own __reduce__. Raises what
    its __getstate__ raises.
    """
    if isinstance(value, type):
        return None
    try:
        reduced = value.__reduce_ex__(4)
    except TypeError:  # an object of C without a state that Python can read
        if type(value).__getstate__ is not object.__getstate__:
            raise
        return None
    if isinstance(reduced, str) or reduced[0] is not NEW_OBJECT or reduced[1][0] is not type(value):
        return None
    _, arguments, state, items, pairs, *_ = (*reduced, None, None, None)
    return [list(arguments[1:]), state, list(items or ()), dict(pairs or ())]


def built(kind: type, parts: Sequence[Any]) -> Any:
    """An object of the class `kind` from its `parts_of`."""
    arguments, state, items, pairs = parts
    made: Any = kind.__new__(kind, *arguments)
    if hasattr(made, "__setstate__") and state is not None:
        made.__setstate__(state)
    elif state is not None:
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        if attributes:
            vars(made).update(attributes)
        for name, value in slots.items():
            object.__setattr__(made, name, value)
    if items:
        made.extend(items)
    for key, value in pairs.items():
        made[key] = value
    return made


def outline_of(like: Any) -> Outline | None:
    """`like`, if it is an Outline, or one that shares its parts; None for what has none."""
    if isinstance(like, Outline):
        return like
    parts = parts_of(like)
    return None if parts is None else Outline(type(like), parts)
