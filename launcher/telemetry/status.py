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
from typing import Any

from launcher.run_dir.atomic import write_json
from launcher.run_dir.status import FILE_NAME, Status
from launcher.telemetry.stream import Record

EVERY_S = 5.0  # half of the documented 10 s, which leaves room for the current step
AT_ONCE = frozenset({"start", "eval", "checkpoint", "restart", "end"})


class StatusFile:
    """Keeps `status.json` up to date with the events. Raises OSError where it cannot be written."""

    name = FILE_NAME

    def __init__(
        self, path: Path, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._every_s = every_s
        self._clock = clock
        self._pace = Pace(clock)
        self._status = Status()
        self._step: Record | None = None  # the latest, not yet in the status
        self._published = -inf
        self._publish()

    def write(self, record: Record) -> None:
        if record["event"] == "step":
            self._step = record
        else:
            self._take_step()
            self._status = self._after(record)
        if record["event"] in AT_ONCE:
            self._published = -inf
        if self._due():
            self._publish()

    def advance(self, epoch: int, step: int) -> None:
        if self._due():
            self._take_step()
            self._status = replace(self._status, epoch=epoch, step=step)
            self._publish()

    def close(self) -> None:
        self._publish()

    def _after(self, record: Record) -> Status:
        event, status = record["event"], self._status
        if event == "start":
            return replace(status, state="running", total_steps=record.get("total_steps"))
        known = status.last.get("eval", record)
        if event == "eval" and known.get("set") != record.get("set"):
            return status  # of several sets the first is shown
        if event in ("step", "eval"):
            last = {**status.last, event: _without(record, "event", "time", "epoch", "higher_is_better")}
            epoch = record.get("epoch", status.epoch)
            return replace(status, epoch=epoch, step=record["step"], last=last)
        if event == "end":
            state = record.get("state", "done")
            return replace(status, state=state, exit=record.get("exit"), step=record["step"], eta_s=None)
        return status

    def _take_step(self) -> None:
        if self._step is not None:
            self._status, self._step = self._after(self._step), None

    def _due(self) -> bool:
        return self._clock() - self._published >= self._every_s

    def _publish(self) -> None:
        self._take_step()
        status = self._status
        eta_s = self._pace.eta_s(status.step, status.total_steps) if status.state == "running" else None
        write_json(self._path, asdict(replace(status, eta_s=eta_s, updated=round(time.time(), 3))))
        self._published = self._clock()  # not before: one that could not be written is due at the next event


class Pace:
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


def _without(record: Record, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}
