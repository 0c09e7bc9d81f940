"""Frozen dataclasses as JSON objects, and back: the one way in which typed records are written and read.

Owns what a file may lack. A field that defaults to None is left out where it is None; a `flat` field's items
stand beside the other keys. Reading never fails: keys that the class does not know are left out, and a value
that is missing or of another type becomes the field's default, else the blank of its type (NaN, 0, "", False,
None or empty). Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

Kind = TypeVar("Kind")
Reader = Callable[[object], Any]

FLAT = {"flat": True}  # metadata of a field: its items stand beside the other keys
NO_INTEGER = 1 << 63  # larger ones are no counts, and many are beyond what a float holds


class MisfitError(Exception):
    """A value is not of the type that a field has."""


@dataclasses.dataclass(frozen=True)
class _Key:
    """A field as it stands in a file."""

    name: str
    is_flat: bool
    may_be_absent: bool  # where it is None
    is_plain: bool  # written as it is: holds no dataclass
    read: Reader
    blank: Callable[[], Any]


def encoded(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, in order."""
    found: dict[str, Any] = {}
    for key in _keys(cast(Hashable, type(value))):
        item = getattr(value, key.name)
        if key.is_flat:
            found.update(item)
        elif item is not None or not key.may_be_absent:
            found[key.name] = item if key.is_plain else _plain(item)
    return found


def decoded(kind: type[Kind], record: Mapping[str, object]) -> Kind:
    """The dataclass whose fields a file holds by name."""
    found: Kind = _decoded(kind, record)
    return found


def exactly(kind: type[Kind], record: Mapping[str, object]) -> Kind:
    """`decoded`, for a file that must be whole. Raises ValueError for what is missing or of another type."""
    found = decoded(kind, record)
    whole = encoded(found)
    odd = [key.name for key in _keys(cast(Hashable, kind)) if whole.get(key.name) != record.get(key.name)]
    if odd:
        raise ValueError(f"{', '.join(odd)}: missing, or of another type than {kind.__name__} has")
    return found


def misfits(kind: Hashable, record: Mapping[str, object]) -> list[str]:
    """The keys of a file whose values are of another type than the fields of these names."""
    return [key.name for key in _keys(kind) if key.name in record and not _fits(key, record[key.name])]


def _fits(key: _Key, value: object) -> bool:
    try:
        key.read(value)
    except MisfitError:
        return False
    return True


def _decoded(kind: Any, record: Mapping[str, object]) -> Any:
    keys = _keys(kind)
    rest = {name: item for name, item in record.items() if name not in {key.name for key in keys}}
    return kind(**{key.name: _read(key, rest if key.is_flat else record.get(key.name)) for key in keys})


def _read(key: _Key, value: object) -> Any:
    try:
        return key.read(value)
    except MisfitError:
        return key.blank()


@cache
def _keys(kind: Hashable) -> tuple[_Key, ...]:
    hints = typing.get_type_hints(cast(Any, kind))
    return tuple(_key(field, hints[field.name]) for field in dataclasses.fields(cast(Any, kind)))


def _key(field: dataclasses.Field[Any], hint: Any) -> _Key:
    blank = _blank(hint) if field.default is dataclasses.MISSING else lambda: field.default
    return _Key(
        field.name,
        is_flat=bool(field.metadata.get("flat")),
        may_be_absent=field.default is None,
        is_plain=not _holds_a_dataclass(hint),
        read=_reader(hint),
        blank=blank,
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return encoded(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _holds_a_dataclass(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(map(_holds_a_dataclass, typing.get_args(hint)))


def _reader(hint: Any) -> Reader:
    """What turns a value of a file into one of this type; it raises MisfitError for any other."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _first_of([_reader(part) for part in parts])
    if origin is Mapping:
        return _mapping_of(_reader(parts[1]))
    if origin is Sequence:
        return _sequence_of(_reader(parts[0]))
    if dataclasses.is_dataclass(hint):
        return lambda value: _decoded(hint, _of_type(dict, value))
    if hint is float:
        return _float
    if hint is int:
        return _integer
    return (lambda value: value) if hint in (object, Any) else lambda value: _of_type(hint, value)


def _first_of(readers: Sequence[Reader]) -> Reader:
    def read(value: object) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except MisfitError:
                continue
        raise MisfitError

    return read


def _mapping_of(reader: Reader) -> Reader:
    def read(value: object) -> dict[str, Any]:
        return dict(_fitting(reader, _of_type(dict, value).items()))

    return read


def _sequence_of(reader: Reader) -> Reader:
    def read(value: object) -> list[Any]:
        return [item for _, item in _fitting(reader, enumerate(_of_type(list, value)))]

    return read


def _fitting(reader: Reader, items: Any) -> Any:
    """The items that fit; a damaged one does not cost the others."""
    for name, item in items:
        try:
            yield name, reader(item)
        except MisfitError:
            continue


def _of_type(kind: Any, value: object) -> Any:
    if type(value) is not kind:
        raise MisfitError
    return value


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MisfitError
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(value: object) -> int:
    if type(value) is not int or abs(value) >= NO_INTEGER:
        raise MisfitError
    return value


def _blank(hint: Any) -> Callable[[], Any]:
    """What stands for a value of this type that a file lacks."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union) or hint in (object, Any):
        return lambda: None
    if hint is float:
        return lambda: math.nan
    if dataclasses.is_dataclass(hint):
        return lambda: _decoded(hint, {})
    blank: Callable[[], Any] = {Mapping: dict, Sequence: list}.get(origin, hint)
    return blank
