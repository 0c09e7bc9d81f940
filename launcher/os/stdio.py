"""The standard streams: never replaced, so that -u and line buffering keep their meaning.

Owns what happens where they cannot be written. A descriptor that is closed is opened on /dev/null, before
another file can take its number. Progress that cannot be written (a full disk, a reader that has left) is
dropped and ends no run. Imports no torch.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def prepare() -> None:
    """Open closed descriptors, and escape what the encoding of stdout lacks. Call it before other imports."""
    for descriptor in range(3):
        _ensure_open(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        _flush(sys.stdout)  # as the next line would, which may raise
        sys.stdout.reconfigure(errors="backslashreplace")


def write(text: str, stream: TextIO) -> None:
    """Write progress and flush it; where that fails, the text is dropped."""
    try:
        stream.write(text)
        stream.flush()
    except (
        BlockingIOError
    ):  # of a terminal that another program has made non-blocking: it stays in the buffer
        pass
    except (OSError, ValueError):  # ValueError: a recipe has closed the stream
        drop_unwritten(stream)


def flush_or_drop() -> OSError | None:
    """Flush stdout and stderr. Returns why stdout could not be written, unless its reader has left."""
    _flush(sys.stderr)
    error = _flush(sys.stdout)
    return None if isinstance(error, BrokenPipeError) else error


def _flush(stream: TextIO) -> OSError | None:
    try:
        stream.flush()
    except (AttributeError, ValueError):  # a recipe has closed or replaced it
        pass
    except OSError as error:
        drop_unwritten(stream)
        return error
    return None


def drop_unwritten(stream: TextIO) -> None:
    """Empty the buffer of a stream that cannot be written.

    What stays there would be written again by each later flush, as before a fork and at the end of the
    interpreter, and fail there.
    """
    try:
        descriptor = stream.fileno()
        before, null = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        try:
            stream.flush()
        finally:
            os.dup2(before, descriptor)
            os.close(before)
            os.close(null)
    except (OSError, ValueError):  # closed, or without a descriptor
        pass


def _ensure_open(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        assert opened == descriptor
        os.set_inheritable(opened, True)
