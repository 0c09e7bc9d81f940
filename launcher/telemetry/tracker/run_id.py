"""The id by which a tracker knows a run, kept in `trackers/NAME.json` so that a resumed run continues it.

It is written before the tracker starts: a run that is killed during the start resumes under the same id.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from launcher.run_dir.atomic import read_json, write_json
from launcher.run_dir.records import TRACKERS


def saved_run_id(run_dir: Path, names: Iterable[str]) -> str:
    """The id that one of these trackers had in an earlier attempt; "" if none had one."""
    return next((run_id for name in names if (run_id := _read(_path_of(run_dir, name)))), "")


def save_run_id(run_dir: Path, name: str, run_id: str) -> None:
    """Keep the id for the attempts that follow. Without it, as on a full disk, they get a new one."""
    path = _path_of(run_dir, name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"run_id": run_id})


def _path_of(run_dir: Path, name: str) -> Path:
    return run_dir / TRACKERS / f"{name}.json"


def _read(path: Path) -> str:
    try:
        return str(read_json(path)["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
