"""Feeds one tracker from a thread of its own, so that it can neither delay nor end the training.

Owns the queue between the two, and what happens with a tracker that raises or does not return.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue

from launcher.errors import described
from launcher.run_dir.atomic import all_encodable
from launcher.telemetry.events import EndEvent, Event, record_of
from launcher.telemetry.stream import Record, Sink
from launcher.telemetry.tracker.protocol import RunInfo, Tracker
from launcher.telemetry.tracker.rows import media_of, scalars_of
from launcher.user_code import user_location

log = logging.getLogger("launcher")


@dataclass(frozen=True)
class TrackerTimeouts:
    """How long a tracker may take before the run continues without it."""

    init_s: float = 10.0  # an online run of wandb that takes longer to start becomes an offline run
    finish_s: float = 30.0  # after the last event, for what has not been written yet


class TrackerSink(Sink):
    """A sink for the tracker that `make` returns; `warn` is told if the tracker fails.

    The tracker is made when the run starts, after its recipe file is loaded.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: RunInfo,
        warn: Callable[[str], None],
        timeouts: TrackerTimeouts | None = None,
    ) -> None:
        self.name = name
        self._make = make
        self._run = run
        self._warn = warn
        self._timeouts = timeouts or TrackerTimeouts()
        self._records: SimpleQueue[Record | None] = SimpleQueue()  # None: no more come
        self._exit_code = 1  # until an `end` event sets it: a run that dies has failed
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"{name}-tracker", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Returns at once."""
        if isinstance(event, EndEvent):
            self._exit_code = event.exit or int(event.state != "done")
        if not self._has_failed:
            record = record_of(event)
            self._records.put(record if event.is_periodic else all_encodable(record))

    def close(self) -> None:
        """Wait until the tracker has everything, up to a limit."""
        self._records.put(None)
        # A few seconds more than the limits that the tracker itself was given.
        limit_s = self._timeouts.init_s + self._timeouts.finish_s + 5
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._give_up(f"it did not finish within {limit_s:g} s")

    def _work(self) -> None:
        try:
            self._track()
        except (Exception, SystemExit) as error:
            log.error("the tracker %s failed", self.name, exc_info=error)
            place = user_location(error)
            self._give_up(f"{described(error)}{f' (at {place})' if place else ''}")

    def _give_up(self, reason: str) -> None:
        self._has_failed = True
        self._warn(f"{self.name} is given up: {reason}. The run continues without it.")

    def _track(self) -> None:
        tracker: Tracker | None = None
        while (record := self._records.get()) is not None:
            if tracker is not None:
                self._log(tracker, record)
            elif record["event"] == "start":
                tracker = self._make()
                self._run.directory.mkdir(parents=True, exist_ok=True)
                tracker.start(replace(self._run, config=all_encodable(dict(self._run.config))))
        if tracker is not None:
            tracker.finish(self._exit_code)

    def _log(self, tracker: Tracker, record: Record) -> None:
        if row := scalars_of(record):
            tracker.log(record["step"], row)
        for name, item in media_of(record).items():
            tracker.media(record["step"], name, item)
