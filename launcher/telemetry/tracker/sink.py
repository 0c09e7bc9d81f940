"""Feeds one tracker from a thread of its own, so that it can neither delay nor end the training.

Owns the queue between the two, and what happens when the queue is full: rows that come in every interval are
left out and counted, what happens once is kept.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from launcher.config.schema import DataConfig, ModelConfig
from launcher.errors import described
from launcher.run_dir.atomic import all_encodable
from launcher.telemetry.events import EndEvent, Event, record_of
from launcher.telemetry.stream import Record, Sink, SinkError
from launcher.telemetry.tracker.protocol import RunInfo, Tracker
from launcher.telemetry.tracker.rows import media_of, scalars_of
from launcher.user_code import user_location

log = logging.getLogger("launcher")

QUEUE_ROWS = 1_000  # that may wait: one that starts within 10 s loses none of 100 rows a second


class TrackerError(SinkError):
    """The tracker cannot record this run, or no longer can."""


@dataclass(frozen=True)
class TrackerTimeouts:
    """How long a tracker may take before the run continues without it."""

    init_s: float = 10.0  # an online run of wandb that takes longer to start becomes an offline run
    finish_s: float = 30.0  # after the last event, for what has not been written yet


class TrackerSink(Sink):
    """A sink for the tracker that `make` returns. `warn` receives problems that do not end tracking.

    The tracker is made when the run starts, after its recipe file is loaded. `facts`, known by then, are
    added to the config.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: RunInfo,
        warn: Callable[[str], None],
        patience: TrackerTimeouts | None = None,
        facts: Callable[[], Mapping[str, object]] = dict,
        queue_rows: int = QUEUE_ROWS,
    ) -> None:
        self.name = name
        self._make = make
        self._run = run
        self._warn = warn
        self._patience = patience or TrackerTimeouts()
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
        self._thread = threading.Thread(target=self._work, name=f"{name}-tracker", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Returns at once. Raises an earlier error of the tracker."""
        record = record_of(event)
        self._raise_failure()
        if isinstance(event, EndEvent):
            self._exit_code = event.exit or int(event.state != "done")
        if event.is_periodic and len(self._waiting) >= self._limit:
            self._dropped += 1
            if self._dropped == 1:
                self._warn(
                    f"{self.name} gets more rows than it can log: {self._limit:,} rows wait, so rows of "
                    "steps are left out there, and counted. metrics.jsonl has all of them. Raise "
                    "train.log_every_steps to log fewer."
                )
            return
        with self._arrived:
            self._waiting.append(record if event.is_periodic else all_encodable(record))
            self._arrived.notify()

    def close(self) -> None:
        """Wait until the tracker has everything, up to a limit. Raises an error of the tracker, once."""
        if self._closed:
            return
        self._closed = True
        with self._arrived:
            self._ending = True
            self._arrived.notify()
        # A few seconds more than the limits that the tracker itself was given.
        limit_s = self._patience.init_s + self._patience.finish_s + 5
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise TrackerError(f"did not finish within {limit_s:g} s")
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
        except (Exception, SystemExit) as error:  # raised by the next call of write or close
            if isinstance(error, TrackerError):
                self._failure = error
                return
            log.error("the tracker %s failed", self.name, exc_info=error)
            place = user_location(error)
            self._failure = TrackerError(f"{described(error)}{f' (at {place})' if place else ''}")

    def _track(self) -> None:
        while (record := self._next()) is not None:
            if record["event"] == "start":
                self._start(record)
            elif self._tracker is not None:
                self._log(self._tracker, record)
        if self._tracker is not None:
            self._tracker.finish(self._exit_code)

    def _next(self) -> Record | None:
        """The next event; None once all are taken and no more can come."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else None

    def _start(self, record: Record) -> None:
        if self._tracker is not None:
            return
        self._tracker = self._make()
        self._run.directory.mkdir(parents=True, exist_ok=True)
        config = used_config(self._run.config, record) | dict(self._facts())
        self._tracker.start(replace(self._run, config=all_encodable(config)))

    def _log(self, tracker: Tracker, record: Record) -> None:
        if row := scalars_of(record):
            tracker.log(record["step"], row)
        for name, item in media_of(record).items():
            tracker.media(record["step"], name, item)


def used_config(config: Mapping[str, Any], start: Record) -> dict[str, object]:
    """The config as trackers show it, with the names of the model and data that the `start` event names.

    Options of a choice that the recipe does not use are omitted.
    """
    kept = {
        group: {field.name for field in fields(kind)}
        for group, kind in (("model", ModelConfig), ("data", DataConfig))
    }
    return dict(config) | {
        group: {key: value for key, value in config[group].items() if key in kept[group]}
        | {"name": start[group]}
        for group in kept
        if start.get(group) and group in config and start[group] != config[group].get("name")
    }
