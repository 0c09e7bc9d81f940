"""Standard streams that cannot fail a run, even if they are closed, full or without a reader.

Owns descriptors 0 to 2 of this process. A closed one is opened on /dev/null, before another file can take its
number; output that cannot be written is dropped. Imports no torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import Any, TextIO

PATIENCE_S = 1.0  # for a slow reader of a stream that does not block


class Unfailing(io.FileIO):
    """Raw output that never raises: a broken pipe or a full device loses the output, not the run."""

    failure: OSError | None = None  # the first, unless a reader has left, as `| head` does

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
            if written is None and select.select([], [self], [], PATIENCE_S)[1]:
                written = super().write(data)
            if written is not None:
                return written
        except BrokenPipeError:
            pass
        except OSError as error:
            self.failure = self.failure or error
        return memoryview(data).nbytes


def make_unfailing() -> None:
    """Open closed descriptors, and replace sys.stdout and sys.stderr. Call it before other imports."""
    for descriptor in range(3):
        _ensure_open(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _unfailing(1, sys.stdout)
    sys.stderr = _unfailing(2, sys.stderr)


def lost_output() -> OSError | None:
    """Why output of this process to stdout was lost; None if none was, or if nobody wanted to read it."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # a recipe has closed or replaced it
        sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.failure if isinstance(raw, Unfailing) else None


def _ensure_open(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        assert opened == descriptor
        os.set_inheritable(opened, True)


def _unfailing(descriptor: int, before: TextIO | None) -> TextIO:
    """A stream like `before`, which is None if Python found the descriptor closed.

    A character that its encoding lacks, such as a byte of a file name that is not UTF-8, is escaped.
    """
    raw = Unfailing(descriptor, "w", closefd=False)
    kept: dict[str, Any] = {"encoding": "utf-8"}
    if isinstance(before, io.TextIOWrapper):
        raw.name = before.name
        kept = {key: getattr(before, key) for key in ("encoding", "line_buffering", "write_through")}
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", **kept)
