"""Reads the files of a run for a report, where they may be missing, damaged, or not files of a run.

Owns the check of each file's content. Invalid content is omitted with a warning; only an unreadable file is
an error.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

from launcher.config.codec import decoded
from launcher.os.stdio import say
from launcher.run_dir.atomic import read_json
from launcher.run_dir.records import RESULT
from launcher.run_dir.result import Result
from launcher.run_dir.status import FILE_NAME as STATUS
from launcher.run_dir.status import Status

MAX_TEXT = 20_000  # characters of one text of a run on a page


@cache
def warn(text: str) -> None:
    """Print a warning, once: `watch` reads the files again and again."""
    say(f"warning: {text}", sys.stderr)


def json_of(run_dir: Path, name: str) -> dict[str, Any]:
    """A JSON object of the run, empty where there is none. Raises OSError."""
    path = run_dir / name
    if not path.exists():
        return {}
    try:
        return dict(read_json(path))
    except ValueError as error:
        warn(f"{path} is damaged: left out ({error})")
        return {}


def result_of(run_dir: Path) -> Result:
    """result.json; blank without one. Raises OSError."""
    return decoded(Result, json_of(run_dir, RESULT))


def status_of(run_dir: Path) -> Status:
    """status.json; without a state where there is none. Raises OSError."""
    return decoded(Status, {"state": "", **json_of(run_dir, STATUS)})


def text_of(path: Path) -> str:
    """The text of the file, with replacement characters for invalid UTF-8; "" without one. Raises OSError."""
    return path.read_text("utf-8", "replace") if path.exists() else ""
