"""`metrics.jsonl`: every event of a run, one JSON object a line; the source of truth for reports.

Owns the format, its writer and its reader. Strict JSON: non-finite floats are the strings "inf", "-inf" and
"nan", which the reader converts back. Complete lines are never changed; they are dropped where a run resumes
from an earlier step.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import listed
from launcher.run_dir.atomic import json_line, open_plain, read_regular, restored, write_text
from launcher.run_dir.records import METRICS
from launcher.telemetry.stream import Record

FILE_NAME = METRICS
FORMAT = 1  # of the events; a reader of an older one leaves out what it does not know
SHOWN = 5  # line numbers in a warning


class EventLog:
    """Appends each event at once, so that a killed run loses at most the line being written."""

    name = FILE_NAME

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._path = path
        self._file = self._opened()

    def write(self, record: Record) -> None:
        line = json_line(record)
        written = self._file.write(line)
        if written != len(line):  # a full disk may accept a part without an error
            raise OSError(f"only {written} of {len(line)} bytes fit into {self._file.name}")

    def rewind(self, step: int, evaluates_again: bool) -> None:
        """Drop the events after `step`, and all `end` events.

        With `evaluates_again`, also drop the evaluation after `step`.
        """
        lines = read_regular(self._path).splitlines(keepends=True)
        kept = [line for line in lines if happened(_event(line), step, evaluates_again)]
        if kept != lines:
            write_text(self._path, b"".join(kept).decode("utf-8", "replace"), durable=True)
            self._file.close()
            self._file = self._opened()

    def close(self) -> None:
        self._file.close()

    def _opened(self) -> io.FileIO:
        return open(open_plain(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of the file in order, without damaged lines. Raises OSError."""
    return read_recording(path).events


@dataclass(frozen=True)
class Recording:
    """The readable events of a file."""

    events: list[dict[str, Any]]
    damaged: list[int]  # line numbers, from 1, that hold no event

    @property
    def warning(self) -> str:
        """The warning about damaged lines; "" if there are none."""
        if not self.damaged:
            return ""
        return f"{FILE_NAME} is damaged: left out line {listed(self.damaged, SHOWN)}"


def read_recording(path: Path) -> Recording:
    """The events of the file and its damaged lines. An incomplete last line (of a killed writer) is ignored.

    Raises OSError.
    """
    *complete, _torn = read_regular(path).split(b"\n")
    found = [(number, _event(line)) for number, line in enumerate(complete, start=1) if line]
    return Recording(
        [event for _, event in found if event is not None],
        [number for number, event in found if event is None],
    )


def recording_of(run_dir: Path) -> Recording:
    """The recorded events of a run; empty before it starts. Raises OSError."""
    path = run_dir / FILE_NAME
    return read_recording(path) if path.exists() else Recording([], [])


def last_run_id(events: Iterable[Record]) -> str | None:
    """The tracker's id of the run, if it has been tracked before."""
    found = [event["run_id"] for event in events if isinstance(event.get("run_id"), str)]
    return found[-1] if found else None


def happened(event: Record | None, step: int, evaluates_again: bool) -> bool:
    """Whether a line is kept. Damaged lines are, for inspection."""
    if event is None:
        return True
    repeated = event["event"] in ("eval", "after_evaluation") and evaluates_again and event["step"] == step
    return event["event"] != "end" and int(event["step"]) <= step and not repeated


def _event(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None if it holds none."""
    try:
        event = restored(json.loads(line))
    except (ValueError, RecursionError):
        return None
    whole = isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step")) is int
    return event if whole else None


def _cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that a resumed run does not append its first event to it."""
    if not path.exists():
        return
    content = read_regular(path)
    end_bytes = content.rfind(b"\n") + 1
    if end_bytes < len(content):
        os.truncate(path, end_bytes)
