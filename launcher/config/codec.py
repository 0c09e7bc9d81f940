"""Frozen dataclasses as JSON objects, and back: the one way in which typed records are written and read.

A field that defaults to None is left out where it is None; a `flat` field's items stand beside the other
keys. Keys that the class does not know are left out, and a field that a file lacks has its default, else the
blank of its type, so that files of other versions are read. Values are not checked: a run wrote them.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

Kind = TypeVar("Kind")

FLAT = {"flat": True}  # metadata of a field: its items stand beside the other keys
# What stands for a value that a file lacks; None for one of any other type.
BLANKS: Mapping[object, object] = {float: math.nan, int: 0, str: "", bool: False, Sequence: (), Mapping: {}}


def encoded(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, in order."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if "flat" in field.metadata:
            found.update(item)
        elif item is not None or field.default is not None:
            found[field.name] = _plain(item)
    return found


def decoded(kind: type[Kind], record: Mapping[str, object]) -> Kind:
    """The dataclass whose fields a file holds by name."""
    found, rest, flat = {}, dict(record), ""
    for field, hint in _fields(typing.cast(object, kind)):
        if "flat" in field.metadata:
            flat = field.name
        elif field.name in record:
            found[field.name] = _built(hint, rest.pop(field.name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            found[field.name] = BLANKS.get(typing.get_origin(hint) or hint)
    if flat:
        found[flat] = rest
    return kind(**found)


@cache
def _fields(kind: Any) -> tuple[tuple[dataclasses.Field[object], Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(kind))


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return encoded(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _built(hint: Any, value: Any) -> Any:
    """The value with the dataclasses that its type has in it."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return decoded(typing.cast("type[object]", hint), value)
    if origin in (types.UnionType, typing.Union):  # X | None, or a number or a word
        return _built(float if float in parts else parts[0], value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_built(parts[0], item) for item in value)
    if origin is Sequence and isinstance(value, list):
        return [_built(parts[0], item) for item in value]
    if origin is Mapping and isinstance(value, dict):
        return {name: _built(parts[1], item) for name, item in value.items()}
    return float(value) if hint is float and type(value) is int else value
