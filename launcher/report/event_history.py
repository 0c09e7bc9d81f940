"""What metrics.jsonl says of a run, for reports, comparisons, sweeps and `watch`: its events, and curves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from launcher.config.codec import decoded, encoded
from launcher.report.curve import Curve
from launcher.telemetry import events
from launcher.telemetry.event_log import FILE_NAME, TailReader
from launcher.telemetry.step_time import PARTS, TimeShares, TimeTotals, time_at_end
from launcher.telemetry.stream import Record

Kind = TypeVar("Kind", bound=events.Event)

STEP_FIELDS = ("loss", "lr", "grad_norm", "scale", "samples_per_s", "step_ms", "memory_bytes")
NO_METRICS = ("samples", "tokens", "seconds")


class EventHistory:
    """The events of a run so far. `add` takes them in the order of the file."""

    def __init__(self) -> None:
        self.steps = {name: Curve() for name in STEP_FIELDS}
        self.parts_ms = {part: Curve() for part in PARTS}  # of a step, over the steps
        self.evaluations: dict[str, Curve] = {}  # by metric; by SET/METRIC where there are several sets
        self.sets: list[str] = []  # the names of several sets, in the order of their first evaluations
        self.gpus: dict[str, dict[str, Curve]] = {}  # by device, by field
        self.skips = Curve()  # step -> loss scale
        self.began: float | None = None  # the first process of the run, in unix seconds
        self.last_time: float | None = None  # of an event, in unix seconds
        self.num_damaged = 0  # lines of the file
        self._events: dict[type[events.Event], list[events.Event]] = {}  # but for those of steps
        self._step: Record | None = None  # the latest
        self._time = TimeTotals()

    def all(self, kind: type[Kind]) -> list[Kind]:
        """The events of one kind, in order."""
        return self._events.get(kind, [])  # type: ignore[return-value]

    def last(self, kind: type[Kind]) -> Kind | None:
        found = self.all(kind)
        return found[-1] if found else None

    @property
    def last_step(self) -> events.StepEvent | None:
        return None if self._step is None else decoded(events.StepEvent, self._step)

    def evaluation(self, name: str) -> Curve | None:
        """The curve of a metric of the first set, or of SET/METRIC; None if it was not evaluated."""
        of_first = f"{self.sets[0]}/{name}" if self.sets else name
        return self.evaluations.get(name) or self.evaluations.get(of_first)

    @property
    def time_shares(self) -> TimeShares | None:
        end = self.last(events.EndEvent)
        return (end and time_at_end(end)) or self._time.shares()

    def add(self, records: Iterable[Record]) -> None:
        """Add events; those of a kind that is not known are left out."""
        for record in records:
            time = record.get("time")
            if isinstance(time, int | float) and math.isfinite(time):
                self.last_time = float(time)
            if record["event"] == events.StepEvent.kind:
                self._add_step(record)
            elif (event := events.event_of(record)) is not None:
                self._events.setdefault(type(event), []).append(event)
                self._add(event)

    def _add(self, event: events.Event) -> None:
        if isinstance(event, events.StartEvent) and self.began is None:
            self.began = event.time
        elif isinstance(event, events.EvalEvent):
            self._add_evaluation(event)
        elif isinstance(event, events.OverflowEvent):
            self.skips.add(event.step, event.scale)
        elif isinstance(event, events.GpuEvent):
            self._add_gpu(event)

    def _add_step(self, record: Record) -> None:
        self._step, step = record, record["step"]
        for name, curve in self.steps.items():
            curve.add(step, record.get(name))
        if self._time.add(record):
            for part, curve in self.parts_ms.items():
                curve.add(step, record[part])

    def _add_evaluation(self, event: events.EvalEvent) -> None:
        prefix = "" if event.set is None else f"{event.set}/"
        if event.set is not None and event.set not in self.sets:
            self.sets.append(event.set)
        for name, value in {"val_loss": event.val_loss, **event.metrics}.items():
            if value is not None and name not in NO_METRICS:
                self.evaluations.setdefault(prefix + name, Curve()).add(event.step, value)

    def _add_gpu(self, event: events.GpuEvent) -> None:
        """Add the numbers of each device; seconds by reason are added up."""
        for place, gpu in enumerate(event.gpus):
            curves = self.gpus.setdefault(f"GPU {place if gpu.index is None else gpu.index}", {})
            for key, value in encoded(gpu).items():
                if key not in ("index", "uuid"):
                    number = sum(value.values()) if isinstance(value, dict) else value
                    curves.setdefault(key, Curve()).add(event.step, number)


class HistoryReader:
    """Follows the metrics.jsonl of a run: `history` is what it said when last polled."""

    def __init__(self, run_dir: Path) -> None:
        self.history = EventHistory()
        self._reader = TailReader(run_dir / FILE_NAME)

    def poll(self) -> EventHistory:
        """Read what is new. Raises OSError."""
        found, replaces = self._reader.poll()
        if replaces:
            self.history = EventHistory()
        self.history.add(found)
        self.history.num_damaged = self._reader.num_damaged
        return self.history


def read_history(run_dir: Path) -> EventHistory:
    """Everything recorded of a run; empty before it starts. Raises OSError."""
    return HistoryReader(run_dir).poll()
