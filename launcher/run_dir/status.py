"""The content of `status.json`.

Owns the update of the file for a run whose rank 0 can no longer write it.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.run_dir.atomic import read_json, write_json

FILE_NAME = "status.json"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


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
            return str(found.get("state", ""))
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
    try:
        write_json(path, before | end)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        path.unlink(missing_ok=True)  # on a full disk the new file has the room of the old one
        write_json(path, before | end)
