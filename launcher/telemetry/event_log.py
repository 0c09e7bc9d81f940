"""`metrics.jsonl`: every event of a run, one JSON object a line; the source of truth for reports.

Owns the format, its writer and its reader. Strict JSON: non-finite floats are the strings "inf", "-inf" and
"nan", which the reader converts back. Complete lines are never changed; they are dropped where a run resumes
from an earlier step.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from launcher.run_dir.atomic import json_line, restored
from launcher.run_dir.records import METRICS
from launcher.telemetry.events import Event, record_of
from launcher.telemetry.stream import Record, Sink

FILE_NAME = METRICS
LAST_BYTES = 512  # a whole line of a step: by its time a reader knows that the file was not cut behind it
MAX_STEP = 1 << 53  # exact in a float


class EventLog(Sink):
    """Appends each event at once, so that a killed run loses at most the line being written.

    `write` raises OSError where an event cannot be written, as on a full disk. The file has whole lines only.
    """

    name = FILE_NAME

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._path = path
        self._file = io.FileIO(path, "ab")

    def write(self, event: Event) -> None:
        self.append(record_of(event))

    def append(self, record: Record) -> None:
        """Write one line."""
        self._append(json_line(record))

    def truncate_after(self, step: int, evaluates_again: bool) -> None:
        """Drop the events after `step`, and all `end` events.

        With `evaluates_again`, also drop the evaluation after `step`. Raises OSError.
        """
        end = None  # of what stays as it is
        kept = []  # what the process that resumes has written so far
        with self._path.open("rb") as file:
            for begin, _, line in lines_of(file):
                if not happened(parsed(line), step, evaluates_again):
                    end = begin if end is None else end
                elif end is not None:
                    kept.append(line)
        if end is not None:
            os.ftruncate(self._file.fileno(), end)
            for line in kept:
                self._append(line)

    def close(self) -> None:
        self._file.close()

    def _append(self, line: bytes) -> None:
        written = self._file.write(line)
        if written != len(line):  # a full disk may accept a part without an error
            os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - (written or 0))
            raise OSError(f"only {written} of {len(line)} bytes fit into {self._path}")


class TailReader:
    """Reads what is appended to a metrics.jsonl; starts again where it was cut, as where a run resumes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin_again()

    def _begin_again(self) -> None:
        self._offset, self._last = 0, b""  # of the first line that is not read, and what stands before it
        self.num_damaged = 0  # lines without an event

    def poll(self) -> tuple[list[Record], bool]:
        """New events, and whether they replace those before. Raises OSError.

        A missing file is an empty one. An incomplete last line waits for its end.
        """
        found: list[Record] = []
        if not self._path.exists():
            was_cut = self._offset > 0
            self._begin_again()
            return found, was_cut
        with self._path.open("rb") as file:
            file.seek(self._offset - len(self._last))
            if was_cut := file.read(len(self._last)) != self._last:
                self._begin_again()
            for _, self._offset, line in lines_of(file, self._offset):  # noqa: B020
                self._last = line[-LAST_BYTES:]
                if (event := parsed(line)) is None:
                    self.num_damaged += 1
                else:
                    found.append(event)
        return found, was_cut


def read_events(path: Path) -> list[dict[str, object]]:
    """All events of the file in order, without damaged lines. Raises OSError."""
    with path.open("rb") as file:
        return [event for _, _, line in lines_of(file) if (event := parsed(line)) is not None]


def recorded(path: Path, kind: str) -> list[dict[str, object]]:
    """The events of one kind, in order; none without a file. Raises OSError."""
    return [event for event in read_events(path) if event["event"] == kind] if path.exists() else []


def happened(event: Record | None, step: int, evaluates_again: bool) -> bool:
    """Whether a line is kept. Damaged lines are, for inspection."""
    if event is None:
        return True
    repeated = event["event"] in ("eval", "after_evaluation") and evaluates_again and event["step"] == step
    return event["event"] != "end" and int(event["step"]) <= step and not repeated


def parsed(line: bytes) -> dict[str, Any] | None:
    """The event of a line, an object with the name of an event and a step; None if it holds none."""
    try:
        event = json.loads(line)
        if b'inf"' in line or b'"nan"' in line:
            event = restored(event)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step")) is int
    return event if whole and 0 <= event["step"] < MAX_STEP else None


def lines_of(file: BinaryIO, begin: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Begin, end and content of each complete line."""
    file.seek(begin)
    for line in file:
        if not line.endswith(b"\n"):
            return  # or what is appended meanwhile would be taken for a line of its own
        yield begin, begin + len(line), line
        begin += len(line)


def _cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that a resumed run does not append its first event to it."""
    if path.exists():
        with path.open("rb") as file:
            end_bytes = sum(len(line) for _, _, line in lines_of(file))
            if end_bytes < file.seek(0, os.SEEK_END):
                os.truncate(path, end_bytes)
