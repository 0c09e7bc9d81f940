"""The content of `status.json`, and what is written to it on behalf of a run that no longer can."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.run_dir.atomic import read_json, write_json
from launcher.run_dir.reserve import write_with_reserve

FILE_NAME = "status.json"


@dataclass(frozen=True)
class Status:
    """The content of the file. `epoch` counts from 0, `step` is the number of steps done."""

    state: str = "starting"  # starting, running, done, preempted, failed
    epoch: int | None = None
    step: int = 0
    total_steps: int | None = None
    eta_s: float | None = None
    last: dict[str, Any] = field(default_factory=dict)  # newest fields of step and eval events
    exit: int | None = None
    updated: float = 0.0  # unix seconds


def mark_failed(path: Path, exit_code: int, steps_done: int = 0) -> None:
    """Rewrite the file as that of a run that has failed, on behalf of a leader that no longer can."""
    mark_ended(path, "failed", exit_code, steps_done)


def mark_ended(path: Path, state: str, exit_code: int, steps_done: int = 0) -> None:
    """Rewrite the file as that of a run that has ended, whether or not its sink was given up meanwhile.

    The rest of it stays, but for the steps where more are known to be done: the file is written every few
    seconds only. Raises OSError.
    """
    try:
        before = read_json(path)
    except (OSError, ValueError):
        before = asdict(Status())
    step = max(steps_done, int(before.get("step") or 0))
    end = {"state": state, "exit": exit_code, "step": step, "eta_s": None, "updated": round(time.time(), 3)}
    write_with_reserve(path.parent, lambda: write_json(path, before | end))
