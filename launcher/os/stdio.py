"""The standard streams: never replaced, so that -u and line buffering keep their meaning.

Owns what happens where they cannot be written: progress for a full disk, or for a reader that has left, is
dropped and ends no run. Imports no torch.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from launcher.errors import escaped


def prepare() -> None:
    """Escape what the encoding of stdout lacks, such as bytes of a file's name that are not UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with _dropping(sys.stdout):  # it flushes
            sys.stdout.reconfigure(errors="backslashreplace")


def write(text: str, stream: TextIO) -> None:
    """Write progress and flush it; where that fails, the text is dropped."""
    with _dropping(stream):
        stream.write(text)
        stream.flush()


def say(text: str, stream: TextIO) -> None:
    """Write a line of progress, `escaped`; where that fails, it is dropped."""
    write(f"{escaped(text)}\n", stream)


def flush() -> None:
    """Flush stdout and stderr, at the end of a process; what cannot be written is dropped."""
    for stream in (sys.stdout, sys.stderr):
        with _dropping(stream):
            stream.flush()


@contextmanager
def _dropping(stream: TextIO) -> Iterator[None]:
    """Where the stream cannot be written, send it to /dev/null from now on.

    Else what is in its buffer would fail again in each later flush, the last one by the interpreter.
    """
    try:
        yield
    except BlockingIOError:
        pass  # of a terminal that another program has made non-blocking: the text stays in the buffer
    except (AttributeError, ValueError):
        pass  # a recipe has closed or replaced it
    except OSError:
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
