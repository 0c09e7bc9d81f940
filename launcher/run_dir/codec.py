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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

Kind = TypeVar("Kind")
Reader = Callable[[object], Any]  # raises MisfitError for a value of another type

FLAT = {"flat": True}  # metadata of a field: its items stand beside the other keys
NO_INTEGER = 1 << 63  # larger ones are no counts, and many are beyond what a float holds
UNIONS = (types.UnionType, typing.Union)


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

    def fits(self, value: object) -> bool:
        try:
            self.read(value)
        except MisfitError:
            return False
        return True

    def read_or_blank(self, value: object) -> Any:
        try:
            return self.read(value)
        except MisfitError:
            return self.blank()


def encoded(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, in order."""
    found: dict[str, Any] = {}
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
    return kind(
        **{key.name: key.read_or_blank(rest if key.is_flat else record.get(key.name)) for key in keys}
    )


def exactly(kind: type[Kind], record: Mapping[str, object]) -> Kind:
    """`decoded`, for a file that must be whole. Raises ValueError for what is missing or of another type."""
    found = decoded(kind, record)
    whole = encoded(found)
    odd = [key.name for key in _keys(kind) if whole.get(key.name) != record.get(key.name)]
    if odd:
        raise ValueError(f"{', '.join(odd)}: missing, or of another type than {kind.__name__} has")
    return found


def misfits(kind: type, record: Mapping[str, object]) -> list[str]:
    """The keys of a file whose values are of another type than the fields of these names."""
    return [key.name for key in _keys(kind) if key.name in record and not key.fits(record[key.name])]


def _keys_of(kind: Any) -> tuple[_Key, ...]:
    hints = typing.get_type_hints(kind)
    return tuple(_key(field, hints[field.name]) for field in dataclasses.fields(kind))


_keys: Callable[[Any], tuple[_Key, ...]] = cache(_keys_of)


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
    """What turns a value of a file into one of this type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return partial(_first_fit, [_reader(part) for part in parts])
    if origin is Mapping:
        return partial(_mapping, _reader(parts[1]))
    if origin is Sequence:
        return partial(_sequence, _reader(parts[0]))
    if dataclasses.is_dataclass(hint):
        return partial(_record, hint)
    if hint in (object, Any):
        return lambda value: value
    return {float: _float, int: _integer}.get(hint, partial(_of_type, hint))


def _first_fit(readers: Sequence[Reader], value: object) -> Any:
    for reader in readers:
        try:
            return reader(value)
        except MisfitError:
            continue
    raise MisfitError


def _record(kind: Any, value: object) -> Any:
    return decoded(kind, _of_type(dict, value))


def _mapping(reader: Reader, value: object) -> dict[str, Any]:
    return dict(_fitting(reader, _of_type(dict, value).items()))


def _sequence(reader: Reader, value: object) -> list[Any]:
    return [item for _, item in _fitting(reader, enumerate(_of_type(list, value)))]


def _fitting(reader: Reader, items: Iterable[tuple[Any, object]]) -> Iterator[tuple[Any, Any]]:
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
    if origin in UNIONS or hint in (object, Any):
        return lambda: None
    if hint is float:
        return lambda: math.nan
    if dataclasses.is_dataclass(hint):
        return partial(_record, hint, {})
    blank: Callable[[], Any] = {Mapping: dict, Sequence: list}.get(origin, hint)
    return blank
