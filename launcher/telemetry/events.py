"""`metrics.jsonl`: every event of a run, one JSON object a line; the source of truth for reports.

Owns the format and both its ends. Strict JSON: non-finite floats are the strings "inf", "-inf" and "nan",
and the reader turns them back. A finished line stays as it is, unless the run goes back to before it.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

from launcher.telemetry.files import json_line, restored, write_text
from launcher.telemetry.stream import Record

FILE_NAME = "metrics.jsonl"


class EventLog:
    """Appends each event at once, so that a killed run has lost at most the line being written."""

    name = FILE_NAME

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._path = path
        self._file = self._opened()

    def write(self, record: Record) -> None:
        line = json_line(record)
        written = self._file.write(line)
        if written != len(line):  # a full disk may take a part and say nothing
            raise OSError(f"only {written} of {len(line)} bytes fit into {self._file.name}")

    def rewind(self, step: int, evaluates_again: bool) -> None:
        """Drop the events after `step`, and those that say that the run has ended.

        Where it `evaluates_again` also the evaluation after `step` itself.
        """
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _happened(json.loads(line), step, evaluates_again)]
        if kept != lines:
            write_text(self._path, b"".join(kept).decode(), durable=True)
            self._file.close()
            self._file = self._opened()

    def close(self) -> None:
        self._file.close()

    def _opened(self) -> io.FileIO:
        return open(self._path, "ab", buffering=0)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of the file, in order; a torn last line (the writer was killed) is left out.

    Raises OSError, and ValueError with the line's number for a damaged line before the last.
    """
    *complete, _torn = path.read_bytes().split(b"\n")
    return [_event(line, f"{path}:{number}") for number, line in enumerate(complete, start=1) if line]


def last_run_id(path: Path) -> str | None:
    """Under which id the tracker knows the run, if it has been tracked before."""
    try:
        events = read_events(path)
    except (OSError, ValueError):
        return None
    return next((event["run_id"] for event in reversed(events) if event.get("run_id")), None)


def _happened(event: dict[str, Any], step: int, evaluates_again: bool) -> bool:
    told_again = event["event"] == "eval" and evaluates_again and event["step"] == step
    return event["event"] != "end" and int(event["step"]) <= step and not told_again


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
