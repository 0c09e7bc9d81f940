"""The content of `status.json`, and the disk space reserved for the last files of a run.

Owns the update of `status.json` for a run whose leader can no longer write it, and one hidden file of the
run's directory, which exists while the run does. It is deleted when the disk is full for result.json or
status.json, to make room for their few kB.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.run_dir.atomic import open_plain, read_json, write_json

RESERVE = ".reserve"
SIZE_BYTES = 64 * 1024  # room for the temporary files of result.json and status.json
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def keep_reserve(directory: Path) -> None:
    """Allocate the reserve if there is room. A run without it continues."""
    with (
        contextlib.suppress(OSError),
        open(open_plain(directory / RESERVE, os.O_RDWR | os.O_CREAT), "r+b") as file,
    ):
        try:
            os.posix_fallocate(file.fileno(), 0, SIZE_BYTES)
        except OSError:
            give_up_reserve(directory)


def give_up_reserve(directory: Path) -> None:
    with contextlib.suppress(OSError):
        (directory / RESERVE).unlink(missing_ok=True)


def write_with_reserve(directory: Path, write: Callable[[], None]) -> None:
    """Call `write`; if the disk is full, delete the reserve and call it again. Raises OSError."""
    try:
        write()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        give_up_reserve(directory)
        write()


FILE_NAME = "status.json"


@dataclass(frozen=True)
class Status:
    """The content of the file. `epoch` counts from 0, `step` is the number of steps done."""

    state: str = "starting"  # starting, running, done, stopped, preempted, pruned, failed
    epoch: int | None = None
    step: int = 0
    total_steps: int | None = None
    eta_s: float | None = None
    last: Mapping[str, Any] = field(default_factory=dict)  # newest fields of step and eval events
    exit: int | None = None
    updated: float = 0.0  # unix seconds


def state_since(path: Path, since: float) -> str:
    """The state of the run, if it was written after `since` (unix seconds); else empty."""
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        updated = found.get("updated")
        if not since or (isinstance(updated, int | float) and updated >= since):
            return str(found.get("state"))
    return ""


def mark_ended(path: Path, state: str, exit_code: int, steps_done: int = 0) -> None:
    """Mark the run as ended, also where its telemetry sink was dropped.

    Other fields are kept. `step` becomes `steps_done` where that is larger, because the file is written only
    every few seconds. Raises OSError.
    """
    try:
        before = read_json(path)
    except (OSError, ValueError):
        before = asdict(Status())
    step = max(steps_done, int(before.get("step") or 0))
    end = {"state": state, "exit": exit_code, "step": step, "eta_s": None, "updated": round(time.time(), 3)}
    write_with_reserve(path.parent, lambda: write_json(path, before | end))
