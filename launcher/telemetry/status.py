"""`status.json`: the current state of a run, in one small file that is replaced atomically.

Owns the file and its estimate of the remaining time. Rewritten at start, evaluation, checkpoint, restart and
end, and otherwise at most every few seconds. Never decides anything about the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf
from pathlib import Path

import launcher.telemetry.events as events
from launcher.run_dir.atomic import write_json
from launcher.run_dir.status import FILE_NAME, Status
from launcher.telemetry.stream import Sink

EVERY_S = 5.0  # half of the documented 10 s, which leaves room for the current step
WRITTEN_AT_ONCE = (
    events.StartEvent,
    events.EvalEvent,
    events.CheckpointEvent,
    events.RestartEvent,
    events.EndEvent,
)
LEFT_OUT = ("event", "time", "epoch", "higher_is_better")  # of the latest events


class StatusFile(Sink):
    """Keeps `status.json` up to date with the events. Raises OSError where it cannot be written."""

    name = FILE_NAME

    def __init__(
        self, path: Path, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._every_s = every_s
        self._clock = clock
        self._pace = EtaEstimator(clock)
        self._status = Status()
        self._step: events.StepEvent | None = None  # the latest, not yet in the status
        self._published = -inf
        self._publish()

    def write(self, event: events.Event) -> None:
        if isinstance(event, events.StepEvent):
            self._step = event
        else:
            self._take_step()
            self._status = self._after(event)
        if isinstance(event, WRITTEN_AT_ONCE):
            self._published = -inf
        if self._due():
            self._publish()

    def on_step(self, epoch: int, step: int) -> None:
        if self._due():
            self._take_step()
            self._status = replace(self._status, epoch=epoch, step=step)
            self._publish()

    def close(self) -> None:
        self._publish()

    def _after(self, event: events.Event) -> Status:
        status = self._status
        if isinstance(event, events.StartEvent):
            return replace(status, state="running", total_steps=event.total_steps)
        if isinstance(event, events.EndEvent):
            return replace(status, state=event.state, exit=event.exit, step=event.step, eta_s=None)
        if not isinstance(event, events.StepEvent | events.EvalEvent):
            return status
        fields = {key: value for key, value in events.record_of(event).items() if key not in LEFT_OUT}
        before = status.last.get(event.kind, fields)
        if isinstance(event, events.EvalEvent) and event.set != before.get("set"):
            return status  # of several sets the first is shown
        last = {**status.last, event.kind: fields}
        return replace(status, epoch=event.epoch, step=event.step, last=last)

    def _take_step(self) -> None:
        if self._step is not None:
            self._status, self._step = self._after(self._step), None

    def _due(self) -> bool:
        return self._clock() - self._published >= self._every_s

    def _publish(self) -> None:
        self._take_step()
        status = self._status
        eta_s = self._pace.eta_s(status.step, status.total_steps) if status.state == "running" else None
        now = round(time.time(), 3)
        write_json(self._path, asdict(replace(status, eta_s=eta_s, updated=now)))
        self._published = self._clock()  # not before: one that could not be written is due at the next event


class EtaEstimator:
    """Seconds per step, measured from the first observed step, without the start-up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def eta_s(self, step: int, total_steps: int | None) -> float | None:
        """Expected seconds until the last step; None before the second observed step."""
        if step < 1 or not total_steps:
            return None
        if self._first is None or step < self._first[0]:
            self._first = (step, self._clock())
        first_step, first_s = self._first
        if step == first_step:
            return None
        return round((self._clock() - first_s) / (step - first_step) * max(0, total_steps - step), 1)
