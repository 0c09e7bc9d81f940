"""The width of a terminal, and text for it: wrapped, and without control characters.

A pipe or a file has no width: text written there is not wrapped, one line per fact, for other programs.
"""

from __future__ import annotations

import os
import textwrap
from typing import TextIO

from launcher.errors import escaped
from launcher.os.stdio import write

USUAL_COLUMNS = 80  # of a terminal that does not report its width


def columns_of(stream: TextIO) -> int | None:
    """The present columns of the stream's terminal, None if it is not a terminal."""
    try:
        if not stream.isatty():
            return None
        return os.get_terminal_size(stream.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError):  # closed, or without a descriptor
        return None


def say(text: str, stream: TextIO) -> None:
    """Write a line of progress, `wrapped` where the stream is a terminal; dropped where that fails."""
    write(f"{wrapped(text, columns_of(stream))}\n", stream)


def wrapped(text: str, columns: int | None) -> str:
    """The text `escaped`, with its lines broken at words; those continued are indented by two more.

    A word that is wider than the terminal, such as a path, stays whole, so that it can be copied.
    """
    text = escaped(text)
    if columns is None:
        return text
    return "\n".join(_filled(line, columns) for line in text.split("\n"))


def _filled(line: str, columns: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    continued = f"{indent}  " if len(indent) * 3 < columns else ""
    return textwrap.fill(
        line.strip(),
        columns,
        initial_indent=indent,
        subsequent_indent=continued,
        break_long_words=False,
        break_on_hyphens=False,
    )
