"""Frozen dataclasses as JSON objects, and back: the one way in which typed records are written and read.

Owns what a file may lack. A field that defaults to None is left out where it is None; a `flat` field's items
stand beside the other keys. Reading never fails: keys that the class does not know are left out, and a value
that is missing or of another type becomes the field's default, else that of its type (NaN, 0, "", False, None
or empty). Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

Kind = TypeVar("Kind")
Reader = Callable[[object], object]  # returns INVALID for a value of another type

FLAT = {"flat": True}  # metadata of a field: its items stand beside the other keys
NO_INTEGER = 1 << 63  # larger ones are no counts, and many are beyond what a float holds
UNIONS = (types.UnionType, typing.Union)
INVALID = object()  # in place of a value that is not of the type that a field has


@dataclasses.dataclass(frozen=True)
class _Key:
    """A field as it stands in a file."""

    name: str
    is_flat: bool
    may_be_absent: bool  # where it is None
    is_plain: bool  # written as it is: holds no dataclass
    read: Reader
    default: Callable[[], object]

    def read_or_default(self, value: object) -> object:
        found = self.read(value)
        return self.default() if found is INVALID else found


def encoded(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, in order."""
    found: dict[str, object] = {}
    for key in _keys(type(value)):
        item = getattr(value, key.name)
        if key.is_flat:
            found.update(item)
        elif item is not None or not key.may_be_absent:
            found[key.name] = item if key.is_plain else _plain(item)
    return found


def decoded(kind: type[Kind], record: Mapping[str, object]) -> Kind:
    """The dataclass whose fields a file holds by name."""
    keys = _keys(kind)
    rest = {name: item for name, item in record.items() if name not in {key.name for key in keys}}
    found = {key.name: key.read_or_default(rest if key.is_flat else record.get(key.name)) for key in keys}
    return kind(**found)


def decode_strict(kind: type[Kind], record: Mapping[str, object]) -> Kind:
    """`decoded`, for a file that must be whole. Raises ValueError for what is missing or of another type."""
    found = decoded(kind, record)
    whole = encoded(found)
    odd = [key.name for key in _keys(kind) if whole.get(key.name) != record.get(key.name)]
    if odd:
        raise ValueError(f"{', '.join(odd)}: missing, or of another type than {kind.__name__} has")
    return found


def misfits(kind: type, record: Mapping[str, object]) -> list[str]:
    """The keys of a file whose values are of another type than the fields of these names."""
    keys = [key for key in _keys(kind) if key.name in record]
    return [key.name for key in keys if key.read(record[key.name]) is INVALID]


def _keys_of(kind: Any) -> tuple[_Key, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(_key(field, hints[field.name]) for field in dataclasses.fields(kind))


_keys: Callable[[object], tuple[_Key, ...]] = cache(_keys_of)


def _key(field: dataclasses.Field[object], hint: object) -> _Key:
    default = _default(hint) if field.default is dataclasses.MISSING else lambda: field.default
    is_flat, is_plain = bool(field.metadata.get("flat")), not _holds_a_dataclass(hint)
    return _Key(field.name, is_flat, field.default is None, is_plain, _reader(hint), default)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return encoded(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _holds_a_dataclass(hint: object) -> bool:
    return dataclasses.is_dataclass(hint) or any(map(_holds_a_dataclass, typing.get_args(hint)))


def _reader(hint: Any) -> Reader:
    """What turns a value of a file into one of this type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return partial(_first_fit, [_reader(part) for part in parts])
    if origin is Mapping:
        return partial(_mapping, _reader(parts[1]))
    if origin is Sequence:
        return partial(_sequence, _reader(parts[0]))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda value: decoded(hint, value) if isinstance(value, dict) else INVALID
    if hint in (object, Any):
        return lambda value: value
    return {float: _float, int: _integer}.get(hint, lambda value: value if type(value) is hint else INVALID)


def _first_fit(readers: Sequence[Reader], value: object) -> object:
    return next((found for reader in readers if (found := reader(value)) is not INVALID), INVALID)


def _mapping(reader: Reader, value: object) -> object:
    """The items that fit; a damaged one does not cost the others."""
    if not isinstance(value, dict):
        return INVALID
    return {name: found for name, item in value.items() if (found := reader(item)) is not INVALID}


def _sequence(reader: Reader, value: object) -> object:
    """The elements that fit; a damaged one does not cost the others."""
    if not isinstance(value, list):
        return INVALID
    return [found for item in value if (found := reader(item)) is not INVALID]


def _float(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return INVALID
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(value: object) -> object:
    return value if type(value) is int and abs(value) < NO_INTEGER else INVALID


def _default(hint: Any) -> Callable[[], object]:
    """What stands for a value of this type that a file lacks."""
    origin = typing.get_origin(hint)
    if origin in UNIONS or hint in (object, Any):
        return lambda: None
    if hint is float:
        return lambda: math.nan
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return partial(decoded, hint, {})
    default: Callable[[], object] = {Mapping: dict, Sequence: list}.get(origin, hint)
    return default
