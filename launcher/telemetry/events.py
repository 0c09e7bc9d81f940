"""`metrics.jsonl`: every event of a run, one JSON object a line; the source of truth for reports.

Owns the format and both its ends. Strict JSON: non-finite floats are the strings "inf", "-inf" and "nan",
and the reader turns them back. Never rewrites a finished line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from launcher.telemetry.files import json_line, restored
from launcher.telemetry.stream import Record

FILE_NAME = "metrics.jsonl"


class EventLog:
    """Appends each event at once, so that a killed run has lost at most the line being written."""

    name = FILE_NAME

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by close)

    def write(self, record: Record) -> None:
        line = json_line(record)
        written = self._file.write(line)
        if written != len(line):  # a full disk may take a part and say nothing
            raise OSError(f"only {written} of {len(line)} bytes fit into {self._file.name}")

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of the file, in order; a torn last line (the writer was killed) is left out.

    Raises OSError, and ValueError with the line's number for a damaged line before the last.
    """
    *complete, _torn = path.read_bytes().split(b"\n")
    return [_event(line, f"{path}:{number}") for number, line in enumerate(complete, start=1) if line]


def _event(line: bytes, where: str) -> dict[str, Any]:
    try:
        event = restored(json.loads(line))
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(event, dict):
        raise ValueError(f"{where} is not a JSON object")
    return event


def _cut_torn_line(path: Path) -> None:
    """A continued run must not glue its first event to the half line of a killed one."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        end_bytes = file.read().rfind(b"\n") + 1
        if end_bytes < size_bytes:
            file.truncate(end_bytes)
