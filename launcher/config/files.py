"""Checks of a YAML file before its values are read: it must be a regular, small file of UTF-8 text.

Owns the limits of a config file and their error messages, so that a device, a data dump or an alias bomb is
refused instead of composed. Builds no value.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import yaml

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
    limits = f"At most {MAX_NODES:,} values and {MAX_DEPTH} levels are accepted."
    try:
        nodes = size_of(yaml.compose(text, Loader=yaml.SafeLoader), {}, MAX_DEPTH)
    except yaml.YAMLError:
        return  # reported with its position where the values are parsed
    except RecursionError:
        raise ConfigError(f"{path}: is nested deeper than {MAX_DEPTH} levels. {limits}") from None
    if nodes > MAX_NODES:
        raise ConfigError(f"{path}: has {nodes:,} values once its aliases (*name) are expanded. {limits}")


def size_of(node: yaml.Node | None, known: dict[yaml.Node, int], levels: int) -> int:
    """The number of values after alias expansion, without building them; an alias is the node that it names.

    Raises RecursionError for more levels, as of an alias within the value that it refers to.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if not levels:
        raise RecursionError
    if node not in known:
        pairs = isinstance(node, yaml.MappingNode)
        inner = itertools.chain.from_iterable(node.value) if pairs else node.value
        known[node] = 1 + sum(size_of(each, known, levels - 1) for each in inner)
    return known[node]
