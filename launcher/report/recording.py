"""Reads metrics.jsonl, for reports, comparisons, sweeps and `watch`.

Owns what is kept of each event: curves, counts, and a bounded number of records. Unknown events are counted
and left out; only an unreadable file is an error.
"""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np

from launcher.errors import listed
from launcher.report.curve import Curve, FloatArray
from launcher.report.reading import MAX_TEXT, bounded
from launcher.run_dir.codec import decoded, encoded
from launcher.telemetry import events
from launcher.telemetry.event_log import FILE_NAME, LAST_BYTES, lines_of, opened, parsed
from launcher.telemetry.step_time import PARTS, TIMES, TimeShares, TimeTotals, time_at_end
from launcher.telemetry.stream import Record

Kind = TypeVar("Kind", bound=events.Event)

STEP_FIELDS = ("loss", "lr", "grad_norm", "scale", "samples_per_s", "step_ms", "memory_bytes")
NO_METRICS = ("samples", "tokens", "seconds")
MAX_CURVES = 5000  # of evaluations, and of devices, of 6 KB: a damaged file may name one in every line
MAX_RECORDS = 200  # of each kind, more than anyone reads on a page; others are counted
LARGEST = 1e300  # beyond it, a number is no measurement, and arithmetic with it may overflow
OF_A_BEGINNING = ("decision", "warning")  # recorded by a process before its first `restart` or `start`
MAX_DAMAGED = 5  # line numbers that a warning shows


@dataclass
class Records(Generic[Kind]):
    """The first and the last events of one kind, and how many there were."""

    count: int = 0
    first: list[Kind] = field(default_factory=list)
    latest: deque[Kind] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS // 2))

    def add(self, event: Kind) -> None:
        self.count += 1
        (self.first if len(self.first) < MAX_RECORDS // 2 else self.latest).append(event)

    def all(self) -> list[Kind]:
        return [*self.first, *self.latest]

    @property
    def last(self) -> Kind | None:
        known = self.latest or self.first
        return known[-1] if known else None


class Curves(dict[str, Curve]):
    """The first MAX_CURVES curves by name."""

    def add_point(self, name: str, x: float, y: float) -> None:
        if name in self or len(self) < MAX_CURVES:
            self.setdefault(name, Curve()).add_point(x, y)


@dataclass
class Attempt:
    """One process of the run, from its `restart` or `start` to its last event, in unix seconds."""

    began: float
    ended: float


class Recording:
    """What was recorded of a run so far. `add` takes whole lines in the order of the file."""

    def __init__(self) -> None:
        self.steps = {name: Curve() for name in STEP_FIELDS}
        self.parts_ms = {part: Curve() for part in PARTS}  # of a step, over the steps
        self.evaluations, self.other_sets = Curves(), Curves()  # by metric; of other sets by SET/METRIC
        self.gpus: dict[str, Curves] = {}  # by device, by field
        self.skips = Curve()  # step -> loss scale
        self.records: dict[type[events.Event], Records[Any]] = {}
        self.attempts: list[Attempt] = []
        self.last_step: events.StepEvent | None = None
        self.last_gpu: events.GpuEvent | None = None
        self.gradients: events.GradientsEvent | None = None  # the latest
        self.last_time: float | None = None  # of an event, in unix seconds
        self.num_lines = 0
        self.damaged: list[int] = []  # lines, the first ones
        self.num_damaged = 0
        self.unknown: Counter[str] = Counter()
        self._sets: dict[str | None, None] = {}  # in the order of their first evaluations
        self._resumes = False  # a process that has not recorded its `start` yet
        self._latest: Record | None = None  # the latest event that is not OF_A_BEGINNING
        self._time = TimeTotals()
        self._rated_step = self._rated_steps = self._rated_time = 0.0

    def of(self, kind: type[Kind]) -> Records[Kind]:
        return self.records.setdefault(kind, Records())

    def evaluation(self, name: str) -> Curve | None:
        """The curve of a metric of the first set, or of SET/METRIC; None if it was not evaluated."""
        of_first = name.removeprefix(f"{next(iter(self._sets), None)}/")
        return self.evaluations.get(name) or self.other_sets.get(name) or self.evaluations.get(of_first)

    @property
    def sets(self) -> list[str]:
        """The names of several validation sets; empty where there is one."""
        return [str(name) for name in self._sets] if len(self._sets) > 1 else []

    @property
    def samples_per_s(self) -> float | None:
        """Samples over time, as each step has as many samples; None without a rate."""
        return self._rated_steps / self._rated_time if self._rated_time else None

    @property
    def time_shares(self) -> TimeShares | None:
        end = self.of(events.EndEvent).last
        return (end and time_at_end(end)) or self._time.shares()

    @property
    def warnings(self) -> list[str]:
        """What was left out, each in a sentence."""
        found = []
        if self.num_damaged:
            more = self.num_damaged - len(self.damaged)
            text = listed(self.damaged, MAX_DAMAGED) + (f" and {more:,} more" if more else "")
            found.append(f"{FILE_NAME} is damaged: left out line {text}")
        newest = max((start.format for start in self.of(events.StartEvent).all()), default=0)
        if newest > events.FORMAT:
            found.append(
                f"{FILE_NAME} is of format {newest}, written by a newer version; this one reads format "
                f"{events.FORMAT}: what it does not know is left out"
            )
        if self.unknown:
            names = listed([f"{name[:40]} ({n:,})" for name, n in self.unknown.most_common(5)], 5)
            found.append(f"{FILE_NAME}: left out unknown events: {names}")
        return found

    def add(self, lines: Sequence[bytes]) -> None:
        """Add complete lines, without their line ends."""
        steps: list[Record] = []
        for number, line in enumerate(lines, self.num_lines + 1):
            if not line:
                continue
            if (record := bounded_event(line)) is None:
                self.num_damaged += 1
                if self.num_damaged <= MAX_DAMAGED:
                    self.damaged.append(number)
                continue
            if record["event"] == events.StepEvent.kind:
                steps.append(record)
            else:
                self._add_rare(record)
            if record["event"] not in OF_A_BEGINNING:
                self._latest = record
        if steps:
            self._add_steps(steps)
        self.num_lines += len(lines)
        last = next((line for line in reversed(lines) if line), b"")
        self._extend_attempt(bounded_event(last))

    def _begin_attempt(self, event: events.RestartEvent | events.StartEvent) -> None:
        """A process that resumes records `restart` first, then `start`; others only the latter."""
        if isinstance(event, events.StartEvent) and self._resumes:
            self._resumes = False
            return
        self._extend_attempt(self._latest)
        time = _sane(event.time)
        self.attempts.append(Attempt(time, time))
        self._resumes = isinstance(event, events.RestartEvent)

    def _extend_attempt(self, record: Record | None) -> None:
        """All events up to this one belong to the latest attempt."""
        if record is None:
            return
        event = decoded(events.Event, record)
        time = _sane(event.time)
        if not math.isnan(time):
            self.last_time = time
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.ended = max(attempt.ended, time)  # nan is not larger

    def _add_steps(self, records: Sequence[Record]) -> None:
        self.last_step = decoded(events.StepEvent, records[-1])

        def column(key: str) -> FloatArray:
            return np.array([_number(record.get(key)) for record in records])

        steps = column("step")
        for name, curve in self.steps.items():
            given = np.array([name in record for record in records])  # a value that is absent is no NaN
            curve.add(steps[given], column(name)[given])
        self._add_rates(steps, column("samples_per_s"))
        times = np.stack([column(key) for key in TIMES], axis=1)
        steps, times = self._time.add_all(steps, times)
        for part, times_ms in zip(PARTS, times[:, 1:].T, strict=True):
            self.parts_ms[part].add(steps, times_ms)

    def _add_rates(self, steps: FloatArray, rates: FloatArray) -> None:
        weights = np.maximum(1.0, np.diff(steps, prepend=self._rated_step))
        self._rated_step = float(steps[-1])
        rated = np.isfinite(rates) & (rates > 0)
        self._rated_steps += float(weights[rated].sum())
        self._rated_time += float((weights[rated] / rates[rated]).sum())

    def _add_rare(self, record: Record) -> None:
        event = events.event_of(record)
        match event:
            case None:
                self.unknown[record["event"]] += 1
            case events.GradientsEvent():
                self.gradients = event
            case events.GpuEvent():
                self._add_gpu(event)
            case _:
                self.of(type(event)).add(event)
        match event:
            case events.RestartEvent() | events.StartEvent():
                self._begin_attempt(event)
            case events.EvalEvent():
                self._add_evaluation(event)
            case events.OverflowEvent():
                self.skips.add_point(event.step, _sane(event.scale))

    def _add_evaluation(self, event: events.EvalEvent) -> None:
        if len(self._sets) < MAX_CURVES:
            self._sets.setdefault(event.set)
        of_first = event.set == next(iter(self._sets))
        curves, prefix = (self.evaluations, "") if of_first else (self.other_sets, f"{event.set}/")
        for name, value in {"loss": event.loss, **event.metrics}.items():
            if value is not None and name not in NO_METRICS and abs(value) < LARGEST:
                curves.add_point(prefix + name, event.step, value)

    def _add_gpu(self, event: events.GpuEvent) -> None:
        """Add the numbers of each device; seconds by reason are added up."""
        self.last_gpu = event
        for place, gpu in enumerate(event.gpus):
            name = f"GPU {place if gpu.index is None else gpu.index}"
            curves = self.gpus.get(name) or Curves()
            if name in self.gpus or len(self.gpus) < MAX_CURVES:
                self.gpus[name] = curves
            for key, value in encoded(gpu).items():
                number = sum(value.values()) if isinstance(value, dict) else value
                if key not in ("index", "uuid", "incomplete") and not math.isnan(_sane(number)):
                    curves.add_point(key, event.step, float(number))


class TailReader:
    """Reads what is appended to a metrics.jsonl; starts again where it was replaced or cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reset()

    def _reset(self) -> None:
        self.recording = Recording()
        self._identity: tuple[int, int] | None = None
        self._offset = 0  # of the first line that was not complete
        self._last = b""  # what stands before the offset
        self._size_bytes = -1  # of the file when it was last read

    def poll(self) -> bool:
        """Read new complete lines; returns whether something changed. Raises OSError.

        A missing file is an empty one. An incomplete last line waits for its end.
        """
        try:
            file = opened(self._path)
        except FileNotFoundError:
            changed = self._identity is not None
            self._reset()
            return changed
        with file:
            status = os.fstat(file.fileno())
            file.seek(self._offset - len(self._last))
            if (status.st_dev, status.st_ino) != self._identity or file.read(len(self._last)) != self._last:
                self._reset()
                self._identity = (status.st_dev, status.st_ino)
            if status.st_size == self._size_bytes:
                return False  # else a torn end of any size would be read at every poll
            changed = self._read(file)
            self._size_bytes = status.st_size  # only now: what could not be read is tried again
            return changed

    def _read(self, file: BinaryIO) -> bool:
        begin = self._offset
        found = list(lines_of(file, begin))
        self.recording.add([line[:-1] for _, _, line in found])
        self._offset = found[-1][1] if found else begin
        file.seek(max(0, self._offset - LAST_BYTES))
        self._last = file.read(min(self._offset, LAST_BYTES))
        return self._offset > begin


def read_recording(run_dir: Path) -> Recording:
    """Everything recorded of a run; empty before it starts. Raises OSError."""
    follower = TailReader(run_dir / FILE_NAME)
    follower.poll()
    return follower.recording


def _number(value: object) -> float:
    """NaN for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _sane(value: float) -> float:
    """The value; NaN for one that is no measurement."""
    return value if abs(value) < LARGEST else math.nan


def bounded_event(line: bytes) -> dict[str, object] | None:
    """The event of a line, with long texts cut; None if it holds none."""
    event = parsed(line)
    cut: dict[str, object] | None = event if len(line) <= MAX_TEXT else bounded(event)
    return cut
