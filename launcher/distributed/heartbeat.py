"""Heartbeats: where each rank's training thread is, in memory shared by the processes of a run.

Owns the names of the phases and the table. A rank writes its own row at each change of phase, in about a
microsecond and without a lock; the process that started the ranks reads all rows. Imports no torch.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from launcher.distributed.exit_records import SharedExitRecords

STEP_PARTS = ("data", "compute", "communication", "update")  # step_timer.PARTS, whose module imports torch
PHASES = (
    "starting",
    "meeting the other ranks",
    "loading data",
    "comparing the data",
    "building the model",
    "comparing the models",
    "restoring",
    "trying micro-batches",
    "trying the evaluation",
    "comparing the trials",
    "recording the step",
    *STEP_PARTS,
    "report",
    "consistency check",
    "evaluation",
    "adding up the evaluation",
    "checkpoint",
    "finishing",
    "done",
)
IN_A_STEP = frozenset(STEP_PARTS)
IN_A_STEP_OR_REPORT = IN_A_STEP | {"report"}  # the report of a step is read before the next one
# A rank in one of these has already run: from here launch.hang_timeout_s holds, not launch.init_timeout_s.
AFTER_A_STEP = frozenset(PHASES[PHASES.index("report") :])
# Phases that are mostly a wait for other ranks.
WAITING = frozenset(
    {
        "meeting the other ranks",
        "comparing the data",
        "comparing the models",
        "comparing the trials",
        "communication",
        "consistency check",
        "adding up the evaluation",
    }
)
# Five minutes for pictures, uploads and the digest of the weights, on a loaded machine too.
FINISHING, FINISHING_S = frozenset({"finishing", "done"}), 300.0
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
_PLACE = struct.Struct("=qqd??")  # phase, step, seconds of the machine's monotonic clock, two of the flags
_ROW = struct.Struct(f"{_PLACE.format}?5x")  # and whether user code waits for another rank: written by itself


@dataclass(frozen=True)
class HeartbeatRecord:
    """The latest heartbeat of a rank. `step` counts from 1; 0 before the first."""

    phase: str
    step: int
    age_s: float
    has_stepped: bool = False  # whether the rank has completed a step since it started
    user_code: bool = False  # whether the rank runs code of the user that may take as long as it likes

    @property
    def order(self) -> tuple[int, int]:
        """A value to compare two ranks by: the one with the lower value is behind."""
        return self.step, _NUMBERS[self.phase]

    @property
    def steps_done(self) -> int:
        """Steps completed by the rank; the one that it is in does not count."""
        return max(0, self.step - (self.phase in IN_A_STEP))


def limit_s(phase: str, hang_timeout_s: float) -> float:
    """How long a rank may stay in a phase. When finishing (plots, uploads) it waits for no other rank."""
    return max(hang_timeout_s, FINISHING_S) if phase in FINISHING else hang_timeout_s


def describe(beat: HeartbeatRecord) -> str:
    """Where in the run a heartbeat is, as part of a sentence."""
    if beat.phase in IN_A_STEP_OR_REPORT:
        return f"in {beat.phase} of step {beat.step}" if beat.step else "before its first step"
    if beat.phase in ("consistency check", "evaluation", "checkpoint"):
        return f"in the {beat.phase} after step {beat.step}"
    if beat.phase == "adding up the evaluation":
        return f"while {beat.phase} after step {beat.step}"
    return "after its last step" if beat.phase == "done" else f"while {beat.phase}"


def stop_notice(beat: HeartbeatRecord, steps_ahead: int = 0) -> str:
    """The answer to a request to stop, printed at once. `steps_ahead`: steps that a device has queued."""
    in_step = beat.phase in IN_A_STEP_OR_REPORT and beat.step and beat.has_stepped
    when = f"after step {beat.step + steps_ahead}" if in_step else f"as soon as possible ({describe(beat)})"
    return f"stopping {when}, then saving; Ctrl-C again ends without saving"


def _beat_of(row: memoryview) -> HeartbeatRecord:
    phase, step, since_s, has_stepped, user_code, waits = _ROW.unpack(row)
    # The first batch is read by the user's data set, which may only now open its files.
    user_code = (user_code or (PHASES[phase] == "data" and not has_stepped)) and not waits
    return HeartbeatRecord(PHASES[phase], step, time.monotonic() - since_s, has_stepped, user_code)


class Heartbeat:
    """One rank's row. Without `exit_records` it is this process's alone: no other one reads it."""

    def __init__(self, row: memoryview | None = None, exit_records: SharedExitRecords | None = None) -> None:
        self._row = memoryview(bytearray(_ROW.size)) if row is None else row
        self.exit_records = exit_records  # of all ranks
        self.failed_s: float | None = None  # when this rank failed, in unix seconds
        self._number, self._step, self._since_s = 0, 0, time.monotonic()
        self._has_stepped = self._user_code = False
        if exit_records is None:
            self._write()

    @property
    def latest(self) -> HeartbeatRecord:
        """Where this rank is, and for how long. May be called from any thread."""
        return _beat_of(self._row)

    @property
    def monitored_by_parent(self) -> bool:
        """Whether another process monitors the heartbeats and detects hangs."""
        return self.exit_records is not None

    def beat(self, phase: str, step: int | None = None) -> None:
        """Record that this rank enters `phase`, one of PHASES, of `step` (None: unchanged).

        Raises KeyError for another phase.
        """
        self._number, self._since_s = _NUMBERS[phase], time.monotonic()
        self._step = self._step if step is None else step
        self._write()

    def phase_setter(self, phases: Mapping[str, str]) -> Callable[[str], None]:
        """A function that records the phase which `phases` has for its argument, if it has one."""

        def enter(part: str) -> None:
            if part in phases:
                self.beat(phases[part])

        return enter

    @contextmanager
    def in_user_code(self) -> Iterator[None]:
        """Within the context this rank runs code of the user, for which no other limit than
        launch.user_code_timeout_s holds, and the others wait. Both ends are signs of life. A rank that waits
        in it for another one is noticed by its hang timer: see `set_waits`.
        """
        before = self._user_code  # such contexts may be nested
        self._set_user_code(True)
        try:
            yield
        finally:
            self._set_user_code(before)

    def _set_user_code(self, inside: bool) -> None:
        self._user_code, self._since_s = inside, time.monotonic()
        self._write()

    def set_waits(self, waits: bool) -> None:
        """Record whether the user's code waits for another rank: it is then timed like any other wait.

        May be called from any thread.
        """
        self._row[_PLACE.size] = waits

    def first_step_done(self) -> None:
        """Record that this rank has completed a step since it started: other limits hold from then on."""
        self._has_stepped = True
        self._write()

    def _write(self) -> None:
        # Not pack_into: it clears the row first, and a reader could see a rank that never started.
        place = _PLACE.pack(self._number, self._step, self._since_s, self._has_stepped, self._user_code)
        self._row[: _PLACE.size] = place


class Heartbeats:
    """The table of all ranks of a machine. Created before the ranks are forked, which inherit its memory."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.restart()

    def restart(self, first_rank: int = 0) -> None:
        """Begin anew for ranks that start now. Those of this machine are numbered from `first_rank` on."""
        ranks = range(first_rank, first_rank + self._num_ranks)
        # Anonymous and shared: no file, no name.
        self._rows = {rank: memoryview(mmap.mmap(-1, _ROW.size)) for rank in ranks}
        self.first_rank, self.exit_records = first_rank, SharedExitRecords(ranks)
        for rank in ranks:
            self.of(rank).beat("starting", 0)

    def of(self, rank: int) -> Heartbeat:
        return Heartbeat(self._rows[rank], self.exit_records)

    def read(self) -> list[HeartbeatRecord]:
        """The latest heartbeat of each rank of this machine, in their order."""
        return [_beat_of(row) for row in self._rows.values()]

    def steps_done(self) -> int:
        """Steps completed by the rank that is furthest ahead."""
        return max(beat.steps_done for beat in self.read())
