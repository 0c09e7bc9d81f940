"""The id by which trackers know a run, kept in `trackers/run.json` so that a resumed run continues it.

It is written before a tracker starts: a run that is killed during the start resumes under the same id.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from launcher.run_dir.atomic import read_json, write_json
from launcher.run_dir.records import TRACKERS

FILE = "run.json"


def saved_run_id(run_dir: Path) -> str:
    """The id that the run had in an earlier attempt; "" if it had none."""
    try:
        return str(read_json(run_dir / TRACKERS / FILE)["run_id"])
    except (OSError, ValueError, KeyError):
        return ""


def save_run_id(run_dir: Path, run_id: str) -> None:
    """Keep the id for the attempts that follow. Without it, as on a full disk, they get a new one."""
    with contextlib.suppress(OSError):
        (run_dir / TRACKERS).mkdir(exist_ok=True)
        write_json(run_dir / TRACKERS / FILE, {"run_id": run_id})
