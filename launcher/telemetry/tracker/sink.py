"""Feeds one tracker from a thread of its own, so that it can neither delay nor end the training.

Owns the queue between the two and what happens when it is full: rows that come in every interval are dropped
and counted, what happens once is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.telemetry.stream import Record
from launcher.telemetry.tracker.protocol import AbortableTracker, TrackedRun, Tracker
from launcher.telemetry.tracker.rows import media_of, row_of
from launcher.telemetry.tracker.used_config import used_config

QUEUE_ROWS = 10_000  # that may wait while the tracker starts, or its service is slow
PERIODIC = ("step", "gradients", "gpu")  # may be dropped; evaluations, overflows and the end never are


class TrackerError(Exception):
    """The tracker cannot record this run, or no longer can."""


@dataclass(frozen=True)
class Patience:
    """How long a tracker may take before the run continues without it."""

    init_s: float = 10.0  # an online run of wandb that takes longer to start becomes an offline run
    finish_s: float = 30.0  # after the last event, for what has not been written yet


class TrackerSink:
    """A sink for the tracker that `make` returns. `warn` receives problems that do not end tracking.

    With `early`, the tracker is made at once; else when the run starts, after its recipe file is loaded.
    `facts` are added to the config; they are known when the run starts.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: TrackedRun,
        warn: Callable[[str], None],
        patience: Patience | None = None,
        early: bool = True,
        queue_rows: int = QUEUE_ROWS,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.name = name
        self._make = make
        self._run = run
        self._warn = warn
        self._patience = patience or Patience()
        self._early = early
        self._limit = queue_rows
        self._facts = facts
        self._waiting: deque[Record] = deque()
        self._arrived = threading.Condition()
        self._ending = False
        self._closed = False
        self._dropped = 0
        self._exit_code = 1  # until an `end` event sets it: a run that dies has failed
        self._failure: Exception | None = None
        self._tracker: Tracker | None = None
        self._is_started = False
        self._thread = threading.Thread(target=self._work, name=f"{name}-tracker", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Returns at once. Raises an earlier error of the tracker."""
        self._raise_failure()
        if record["event"] == "end":
            done = record.get("state", "done") == "done"
            self._exit_code = record.get("exit") or (0 if done else 1)
        with self._arrived:
            if len(self._waiting) >= self._limit and record["event"] in PERIODIC:
                self._dropped += 1
                is_first = self._dropped == 1
            else:
                is_first = False
                self._waiting.append(record)
                self._arrived.notify()
        if is_first:
            self._warn(
                f"{self.name} is slower than the run: {self._limit:,} rows wait for it, so rows of steps are "
                "left out there, and counted. metrics.jsonl has all of them."
            )

    def close(self) -> None:
        """Wait until the tracker has everything, up to a limit. Raises an error of the tracker, once."""
        if self._closed:
            return
        self._closed = True
        with self._arrived:
            self._ending = True
            self._arrived.notify()
        limit_s = self._patience.init_s + self._patience.finish_s + 5
        self._thread.join(limit_s)
        if self._thread.is_alive():
            advice = self._tracker.abort() if isinstance(self._tracker, AbortableTracker) else ""
            raise TrackerError(f"did not finish within {limit_s:g} s{advice}")
        self._raise_failure()
        if self._dropped:
            self._warn(f"{self.name}: {self._dropped:,} rows were left out. metrics.jsonl has all of them.")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._closed = True
            raise failure

    def _work(self) -> None:
        try:
            self._track()
        except Exception as error:  # raised by the next call of write or close, in the caller's thread
            self._failure = error if isinstance(error, TrackerError) else TrackerError(in_one_line(error))

    def _track(self) -> None:
        if self._early:
            self._tracker = self._make()
        while (record := self._next()) is not None:
            if record["event"] == "start":
                self._start(record)
            elif self._tracker is not None and self._is_started:
                self._log(self._tracker, record)
        if self._tracker is not None and self._is_started:
            self._tracker.finish(self._exit_code)

    def _next(self) -> Record | None:
        """The next event; None once all are taken and no more can come."""
        with self._arrived:
            while not self._waiting and not self._ending:
                self._arrived.wait()
            return self._waiting.popleft() if self._waiting else None

    def _start(self, record: Record) -> None:
        if self._is_started:
            return
        self._tracker = self._tracker or self._make()
        self._run.directory.mkdir(parents=True, exist_ok=True)
        self._is_started = True
        config = used_config(self._run.config, record) | dict(self._facts())
        self._tracker.start(replace(self._run, config=config))

    def _log(self, tracker: Tracker, record: Record) -> None:
        if row := row_of(record):
            tracker.log(record["step"], row)
        for name, item in media_of(record).items():
            tracker.media(record["step"], name, item)


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
