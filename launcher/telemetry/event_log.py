"""`metrics.jsonl`: every event of a run, one JSON object a line; the source of truth for reports.

Owns the format, its writer and its reader. Strict JSON: non-finite floats are the strings "inf", "-inf" and
"nan", which the reader converts back. Complete lines are never changed; they are dropped where a run resumes
from an earlier step.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from launcher.run_dir.atomic import json_line, open_plain, restored
from launcher.run_dir.records import METRICS
from launcher.telemetry.events import PERIODIC, Event, record_of
from launcher.telemetry.stream import LIMIT, Record, Sink

FILE_NAME = METRICS
LAST_BYTES = 512  # a whole line of a step: by its time a reader knows that the file was not cut behind it
MAX_STEP = 1 << 53  # exact in a float


class EventLog(Sink):
    """Appends each event at once, so that a killed run loses at most the line being written.

    `write` raises OSError where an event cannot be written, and keeps it: the next call writes it first. Of
    more than `limit` events that wait, the oldest periodic ones are lost. The file has whole lines only.
    """

    name = FILE_NAME

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        _cut_torn_line(path)
        self._path = path
        self._limit = limit
        self._file = self._opened()
        self._unwritten: deque[tuple[str, int, bytes]] = deque()  # event, step, line
        self._lost: list[int] = []  # steps of the events that are lost
        self._rewind: tuple[int, bool] | None = None  # not done yet
        self._last_step = 0

    def write(self, event: Event) -> None:
        self.append(record_of(event))

    def append(self, record: Record) -> None:
        """Write one line."""
        self._unwritten.append((record["event"], record.get("step", 0), json_line(record)))
        self._write_all()

    def rewind(self, step: int, evaluates_again: bool) -> None:
        """Drop the events after `step`, and all `end` events.

        With `evaluates_again`, also drop the evaluation after `step`. Where that raises OSError, the next
        `write` does it first.
        """
        self._rewind = step, evaluates_again
        self._write_all()

    def lacks(self) -> str:
        """The events that are not in the file, in words; "" if it has all. Tries to write them once more."""
        if self._unwritten:
            with contextlib.suppress(OSError):
                self._write_all()
        steps = [*self._lost, *(step for _, step, _ in self._unwritten)]
        return f"{len(steps):,} events of steps {min(steps)} to {max(steps)}" if steps else ""

    def close(self) -> None:
        try:
            self._write_all()
        finally:
            self._file.close()

    def _write_all(self) -> None:
        """Write what waits. Raises OSError; what is not written waits for the next call."""
        try:
            self._require_file()
            if self._rewind is not None:
                self._drop_events(*self._rewind)
                self._rewind = None
            while self._unwritten:
                self._append(self._unwritten[0][2])
                self._last_step = self._unwritten.popleft()[1]
        except OSError:
            self._forget_oldest()
            raise

    def _forget_oldest(self) -> None:
        """Keep at most `limit` events in memory, and all that are not periodic."""
        if len(self._unwritten) > self._limit:
            periodic = (place for place, (event, _, _) in enumerate(self._unwritten) if event in PERIODIC)
            if (oldest := next(periodic, None)) is not None:
                self._lost.append(self._unwritten[oldest][1])
                del self._unwritten[oldest]

    def _append(self, line: bytes) -> None:
        written = self._file.write(line)
        if written != len(line):  # a full disk may accept a part without an error
            os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - (written or 0))
            raise OSError(f"only {written} of {len(line)} bytes fit into {self._path}")

    def _require_file(self) -> None:
        """Begin a new file and raise OSError where the file that is written no longer has a name."""
        if self._file.closed:  # there was no directory for a new one
            self._file = self._opened()
        elif os.fstat(self._file.fileno()).st_nlink == 0:
            self._file.close()
            gone = self._path if self._path.parent.exists() else self._path.parent
            with contextlib.suppress(OSError):
                self._file = self._opened()
            raise OSError(
                f"{gone} has been deleted or replaced during the run: what was recorded up to step "
                f"{self._last_step} is lost"
            )

    def _drop_events(self, step: int, evaluates_again: bool) -> None:
        end = None  # of what stays as it is
        kept: list[tuple[str, int, bytes]] = []  # what the process that resumes has written so far
        with opened(self._path) as file:
            for begin, _, line in lines_of(file):
                event = parsed(line)
                if not happened(event, step, evaluates_again):
                    end = begin if end is None else end
                elif end is not None:
                    kept.append((event["event"], event["step"], line) if event else ("", 0, line))
        if end is not None:
            os.ftruncate(self._file.fileno(), end)
            self._unwritten.extendleft(reversed(kept))

    def _opened(self) -> io.FileIO:
        return open(open_plain(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def read_events(path: Path) -> list[dict[str, object]]:
    """All events of the file in order, without damaged lines. Raises OSError."""
    with opened(path) as file:
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


def opened(path: Path) -> BinaryIO:
    """The file, to be read. Raises OSError."""
    return open(open_plain(path, os.O_RDONLY), "rb")


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
        with opened(path) as file:
            end_bytes = sum(len(line) for _, _, line in lines_of(file))
            if end_bytes < file.seek(0, os.SEEK_END):
                os.truncate(path, end_bytes)
