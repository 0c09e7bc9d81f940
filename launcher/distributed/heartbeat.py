"""Heartbeats: where each rank's training thread is, in memory shared by the processes of a run.

Owns the names of the phases and the table. A rank writes its own row at each change of phase, in about a
microsecond and without a lock; the process that started the ranks reads all rows. Imports no torch.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from launcher.distributed.last_words import LastWords

STEP_PARTS = ("data", "compute", "wire", "update")  # step_timer.PARTS, whose module imports torch
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
    "recording the step",
    *STEP_PARTS,
    "report",
    "consistency check",
    "evaluation",
    "checkpoint",
    "finishing",
    "done",
)
IN_A_STEP = frozenset(STEP_PARTS)
# Five minutes for pictures, uploads and the digest of the weights, on a loaded machine too.
FINISHING, FINISHING_S = frozenset({"finishing", "done"}), 300.0
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
_ROW = struct.Struct("=qqd?")  # phase, step, seconds of the machine's monotonic clock, Beat.under_way
_SAMPLE = struct.Struct("=q")  # after the row; written for each sample, and the row for each phase
_SIZE = _ROW.size + _SAMPLE.size


@dataclass(frozen=True)
class Beat:
    """The latest heartbeat of a rank. `step` counts from 1; 0 before the first."""

    phase: str
    step: int
    age_s: float
    under_way: bool = False  # whether the rank has completed a step since it started
    sample: int = -1  # that it reads itself, by its index; negative: none, or several at once

    @property
    def order(self) -> tuple[int, int]:
        """A value to compare two ranks by: the one with the lower value is behind."""
        return self.step, _NUMBERS[self.phase]


def limit_s(phase: str, stall_s: float) -> float:
    """How long a rank may stay in a phase. When finishing (plots, uploads) it waits for no other rank."""
    return max(stall_s, FINISHING_S) if phase in FINISHING else stall_s


def where(beat: Beat) -> str:
    """Where in the run a heartbeat is, as part of a sentence."""
    if beat.sample >= 0:
        return f"{where(replace(beat, sample=-1))}, reading sample {beat.sample}"
    if beat.phase in (*STEP_PARTS, "report"):
        return f"in {beat.phase} of step {beat.step}" if beat.step else "before its first step"
    if beat.phase in ("consistency check", "evaluation", "checkpoint"):
        return f"in the {beat.phase} after step {beat.step}"
    return "after its last step" if beat.phase == "done" else f"while {beat.phase}"


def steps_done(phase: str, step: int) -> int:
    """Steps completed by a rank that is in `phase` of `step`."""
    return max(0, step - (phase in IN_A_STEP))


class Heartbeat:
    """One rank's row. Without a table no other process reads it."""

    def __init__(self, table: mmap.mmap | None = None, rank: int = 0, words: LastWords | None = None) -> None:
        self._table = table
        self.words = words  # of all ranks; None without a process that reads them
        self._row = slice(rank * _SIZE, rank * _SIZE + _ROW.size)
        self._of_sample = slice(rank * _SIZE + _ROW.size, (rank + 1) * _SIZE)
        self._step = 0
        self._phase, self._number = PHASES[0], 0
        self._since_s = time.monotonic()
        self._under_way = False
        self._sample = -1

    @property
    def latest(self) -> Beat:
        """Where this rank is, and for how long. May be called from any thread."""
        return Beat(self._phase, self._step, time.monotonic() - self._since_s, self._under_way, self._sample)

    @property
    def steps_done(self) -> int:
        """Steps completed by this rank; the current one does not count."""
        return steps_done(self._phase, self._step)

    @property
    def watched(self) -> bool:
        """Whether another process monitors the heartbeats and detects hangs."""
        return self._table is not None

    def beat(self, phase: str, step: int | None = None) -> None:
        """Record that this rank enters `phase`, one of PHASES, of `step` (None: unchanged).

        Raises KeyError for another phase, also where no process reads it.
        """
        number = _NUMBERS[phase]
        if step is not None:
            self._step = step
        self._phase, self._number = phase, number
        self._since_s = time.monotonic()
        self._write()

    def entering(self, phases: Mapping[str, str]) -> Callable[[str], None]:
        """A function that records the phase which `phases` has for its argument, if it has one.

        The phases are looked up once, because it is called several times in a step.
        """
        numbered = {part: (phase, _NUMBERS[phase]) for part, phase in phases.items()}
        table, row, clock, pack = self._table, self._row, time.monotonic, _ROW.pack

        def enter(part: str) -> None:
            if (found := numbered.get(part)) is None:
                return
            self._phase, number = found
            self._number = number
            self._since_s = now_s = clock()
            if table is not None:  # as in `_write`: two calls fewer, five times in a step
                table[row] = pack(number, self._step, now_s, self._under_way)

        return enter

    def reading(self, index: int) -> None:
        """Record that this rank's own process reads a sample; a negative number: none any more."""
        self._sample = index
        if self._table is not None:
            self._table[self._of_sample] = _SAMPLE.pack(index)

    def first_step_done(self) -> None:
        """Record that this rank has completed a step since it started: other limits hold from then on."""
        self._under_way = True
        self._write()

    def _write(self) -> None:
        if self._table is not None:
            # Not pack_into: it clears the row first, and a reader could see a rank that never started.
            self._table[self._row] = _ROW.pack(self._number, self._step, self._since_s, self._under_way)


class Heartbeats:
    """The table of all ranks of a machine. Created before the ranks are forked, which inherit its memory."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.first_rank = 0  # of this machine, whose ranks are numbered in one row
        self._memory = mmap.mmap(-1, num_ranks * _SIZE)  # anonymous and shared: no file, no name
        self.words = LastWords(num_ranks)
        self.restart()

    def restart(self, first_rank: int = 0) -> None:
        """Reset all ranks to starting, as of now."""
        self.first_rank = self.words.first_rank = first_rank
        self.words.clear()
        for rank in range(first_rank, first_rank + self._num_ranks):
            self.of(rank).beat("starting", 0)
            self.of(rank).reading(-1)

    def of(self, rank: int) -> Heartbeat:
        return Heartbeat(self._memory, rank - self.first_rank, self.words)

    def read(self) -> list[Beat]:
        """The latest heartbeat of each rank of this machine, in their order."""
        now = time.monotonic()
        rows = (_ROW.unpack_from(self._memory, rank * _SIZE) for rank in range(self._num_ranks))
        samples = (
            _SAMPLE.unpack_from(self._memory, rank * _SIZE + _ROW.size)[0] for rank in range(self._num_ranks)
        )
        return [
            Beat(PHASES[phase], step, now - since_s, done, sample)
            for (phase, step, since_s, done), sample in zip(rows, samples, strict=True)
        ]

    def steps_done(self) -> int:
        """Steps completed by the rank that is furthest ahead."""
        return max(steps_done(beat.phase, beat.step) for beat in self.read())
