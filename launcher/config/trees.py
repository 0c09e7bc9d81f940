"""Walks over nested values of a config: its paths, leaves and texts. Pure; knows no key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def leaves(
    values: Mapping[str, object], prefix: str = "", whole: str | None = None
) -> Iterator[tuple[str, object]]:
    """Dotted path and value of each leaf; a section with the name `whole` counts as one leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and key != whole:
            yield from leaves(value, f"{prefix}{key}.", whole)
        else:
            yield f"{prefix}{key}", value


def paths_of(values: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """The dotted path of every key of the tree, sections included."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from paths_of(value, f"{prefix}{key}.")


def value_at(values: object, path: str) -> object:
    """The value at a dotted path; None where there is none."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def replaced(
    values: Mapping[str, object], changes: Mapping[str, object], prefix: str = ""
) -> dict[str, object]:
    """A copy of `values` with `changes` applied, by dotted path."""
    return {
        key: replaced(value, changes, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else changes.get(f"{prefix}{key}", value)
        for key, value in values.items()
    }


def nested(value: object) -> Iterator[object]:
    """The value and those within it, at any depth."""
    yield value
    if isinstance(value, dict | list | tuple):  # a check for Mapping takes three times as long
        for item in value.values() if isinstance(value, dict) else value:
            yield from nested(item)


def texts(value: object) -> Iterator[str]:
    """The strings at any depth of a value, without the keys of mappings."""
    return (each for each in nested(value) if isinstance(each, str))


def nested_keys(value: object) -> Iterator[str]:
    """The keys of the mappings at any depth of a value."""
    return (str(key) for each in nested(value) if isinstance(each, dict) for key in each)


def typed_leaves(tree: Mapping[str, object]) -> dict[str, str]:
    """The values of `leaves` as users type them, by dotted path."""
    return {key: "null" if value is None else str(value) for key, value in leaves(tree)}
