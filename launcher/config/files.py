"""Checks of a YAML file before its values are read: it must be a regular, small file of UTF-8 text.

Owns the limits of a config file and their error messages, so that a device, a data dump or an alias bomb is
refused instead of composed. Reads parser events only and builds no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, Event, ScalarEvent

from launcher.errors import ConfigError

MAX_BYTES = 64_000  # the largest of conf/ has 4,000; PyYAML reads about 200 kB per second
MAX_NODES = 20_000  # values after the expansion of all aliases: about as many as a file of MAX_BYTES can list
MAX_DEPTH = 30  # the deepest file of conf/ has 4 levels
RULE = f"A config file is UTF-8 text of at most {MAX_BYTES:,} bytes."


def checked_text(path: Path) -> str:
    """The text of a config file that is safe to parse. Raises ConfigError, which names the file."""
    try:
        if not path.is_file():  # before opening it: a pipe without a writer would block forever
            raise ConfigError(f"{path}: is not a regular file. {RULE}")
        size_bytes = path.stat().st_size
        if size_bytes > MAX_BYTES:
            raise ConfigError(f"{path}: has {size_bytes:,} bytes. {RULE} Data belongs in files of its own.")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start}). {RULE}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    refuse_bombs(path, text)
    return text


def refuse_bombs(path: Path, text: str) -> None:
    """Raises ConfigError for YAML that is far larger, or nested deeper, than it looks."""
    try:
        nodes = expanded_nodes(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError:
        return  # reported with its position where the values are parsed
    except TooLarge as error:
        raise ConfigError(f"{path}: {error}") from None
    if nodes > MAX_NODES:
        raise ConfigError(f"{path}: has {nodes:,} values once its aliases (*name) are expanded. {LIMITS}")


LIMITS = f"At most {MAX_NODES:,} values and {MAX_DEPTH} levels are accepted."


class TooLarge(Exception):
    """The structure exceeds a limit; the message says which."""


def expanded_nodes(events: Iterator[Event]) -> int:
    """The number of values after alias expansion, without building them. Raises TooLarge, YAMLError."""
    sizes = [0]  # of the open collections, outermost first
    open_anchors: list[str | None] = [None]
    anchored: dict[str, int] = {}
    for event in events:
        if isinstance(event, CollectionStartEvent):
            sizes.append(1)
            open_anchors.append(event.anchor)
            if len(sizes) > MAX_DEPTH:
                raise TooLarge(f"is nested deeper than {MAX_DEPTH} levels. {LIMITS}")
        elif isinstance(event, CollectionEndEvent):
            size, anchor = sizes.pop(), open_anchors.pop()
            sizes[-1] += size
            if anchor is not None:
                anchored[anchor] = size
        elif isinstance(event, ScalarEvent):
            sizes[-1] += 1
            if event.anchor is not None:
                anchored[event.anchor] = 1
        elif isinstance(event, AliasEvent) and event.anchor is not None:
            if event.anchor in open_anchors:
                raise TooLarge(f"the alias *{event.anchor} is within the value that it refers to. {LIMITS}")
            sizes[-1] += anchored.get(event.anchor, 1)
    return sizes[0]
