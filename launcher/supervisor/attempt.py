"""One set of workers, from the fork to the last exit.

Owns their processes, the store's file in which they meet, the look at their signs of life, and their end:
whoever is left when a generation has failed is killed at once, for it sits in a collective.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from launcher.distributed.handoff import Departure
from launcher.distributed.heartbeat import IN_A_STEP, PHASES, Beat, limit_s
from launcher.distributed.process_group import first_failure
from launcher.process.lifetime import Orphans
from launcher.supervisor.child import SHOW_STACKS, Work, departure_key
from launcher.supervisor.root_cause import OVERRUN, PREEMPTED, Fate, Verdict, hang, judge

SETTLE_S = 0.5  # for the last words of the others, once one has failed
OVERRUN_S = 3.0  # where these decide who is to blame: they compare what they called
STACKS_S = 0.5
PAUSE_S = 1.0  # a parent that was not there for longer than this was stopped itself, with its workers
STEP_PHASES = IN_A_STEP - {"data"}
AFTER_A_STEP = frozenset(PHASES[PHASES.index("report") :])


def make_store(work: Work, generation: int) -> dist.Store:
    """The store of a generation, made before the fork: who reads a file that is not there waits for it."""
    store = dist.FileStore(str(work.store_of(generation)))
    store.set("open", "")
    return store


class Generation:
    """Watches the workers of one generation. `look` is to be called every fraction of a second."""

    def __init__(
        self,
        number: int,
        processes: Sequence[BaseProcess],
        store: dist.Store,
        work: Work,
        orphans: Orphans,
    ) -> None:
        self._number = number
        self._processes = processes
        self._store = store
        self._work = work
        self._orphans = orphans
        self._limits = work.config.launch
        self._began_s = self._looked_s = self._watched_since_s = time.monotonic()
        self._deadline_s = float("inf")
        self._heard: set[int] = set()  # ranks whose exit has been seen
        self._first_step: int | None = None

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on to all who are left."""
        for process in self._processes:
            _send(process, number)

    def end_within(self, seconds: float) -> None:
        """Give the workers so long, or the time that they have left if that is shorter."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + seconds)

    def look(self) -> Verdict | None:
        """What became of the workers, once they have ended or been ended; None while they are at work."""
        now = time.monotonic()
        if now - self._looked_s > PAUSE_S:
            self._watched_since_s = now
        self._looked_s = now
        self._orphans.reap(self._pids())
        for rank, process in enumerate(self._processes):
            if rank not in self._heard and process.exitcode is not None:
                self._heard.add(rank)
                self._hear_of(process.exitcode)
        if len(self._heard) == len(self._processes) or now >= self._deadline_s:
            return self._judge()
        if self._deadline_s == float("inf") and self._is_overdue(now):
            return self._name_who_hangs()
        return None

    def kill(self) -> None:
        """End whoever is left, now, and what the workers have started."""
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.join(5)
        self._orphans.end(self._pids())

    def tidy(self) -> None:
        """Remove what was prepared for stacks and never used."""
        for rank in range(len(self._processes)):
            path = self._work.stacks_of(rank)
            with contextlib.suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()

    def _pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def _hear_of(self, exit_code: int) -> None:
        if exit_code == 0:
            return
        if exit_code == PREEMPTED:
            self.end_within(self._limits.grace_s)
        elif exit_code in OVERRUN:
            self.end_within(OVERRUN_S)
        else:
            # Where a signal came from outside there is no doubt about who was first.
            self.end_within(0 if exit_code < 0 else SETTLE_S)

    def _judge(self) -> Verdict:
        fates = self._fates()
        self.kill()
        # Read only now: a worker that was stopped within a call of the store would hold its lock.
        departures = self._departures()
        told = [_with_departure(fate, departures.get(fate.rank)) for fate in fates]
        return judge(told, self._first_failure(), self._limits.stall_s)

    def _name_who_hangs(self) -> Verdict:
        fates = self._fates()
        verdict = hang(fates)
        self._dump_stacks([fate for fate in fates if fate.exit_code is None])
        self.kill()
        stacks = self._work.stacks_of(0).with_name("stacks-rank*.txt")
        return Verdict(verdict.exit_code, f"{verdict.text}; stacks of all ranks: {stacks}")

    def _is_overdue(self, now: float) -> bool:
        beats = self._beats_of_the_living()
        if not self._is_under_way(beats):
            return now - max(self._began_s, self._watched_since_s) >= self._limits.init_timeout_s
        longest = now - self._watched_since_s
        return any(min(beat.age_s, longest) >= limit_s(beat.phase, self._limits.stall_s) for beat in beats)

    def _is_under_way(self, beats: Sequence[Beat]) -> bool:
        """Whether a first step is behind them. After a restart it is not number 1."""
        steps = [beat.step for beat in beats if beat.phase in STEP_PHASES]
        if steps and self._first_step is None:
            self._first_step = min(steps)
        after = self._first_step is not None and any(step > self._first_step for step in steps)
        return after or any(beat.phase in AFTER_A_STEP for beat in beats) or bool(self._heard)

    def _beats_of_the_living(self) -> list[Beat]:
        beats = self._work.heartbeats.read()
        return [beats[rank] for rank in range(len(self._processes)) if rank not in self._heard]

    def _fates(self) -> list[Fate]:
        beats = self._work.heartbeats.read()
        return [
            Fate(rank, process.pid or 0, beats[rank], process.exitcode, stopped=_is_stopped(process))
            for rank, process in enumerate(self._processes)
        ]

    def _departures(self) -> dict[int, Departure]:
        keys = {rank: departure_key(self._number, rank) for rank in range(len(self._processes))}
        found = {}
        # The file may have been torn by a kill: then nobody said anything.
        with contextlib.suppress(RuntimeError, ValueError, MemoryError):
            for rank, key in keys.items():
                if self._store.check([key]):
                    found[rank] = Departure(**json.loads(self._store.get(key)))
        return found

    def _first_failure(self) -> int | None:
        with contextlib.suppress(RuntimeError, ValueError, MemoryError):
            return first_failure(self._store, str(self._number))
        return None

    def _dump_stacks(self, alive: Sequence[Fate]) -> None:
        """Have the living write their stacks; wait until the files have stopped growing, or half a second."""
        paths = [self._work.stacks_of(fate.rank) for fate in alive]
        before = sizes = [_size(path) for path in paths]
        for fate in alive:
            _ask_for_stacks(fate.pid)
        self.send(signal.SIGCONT)  # who is stopped handles no signal
        deadline = time.monotonic() + STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.03)
            last, sizes = sizes, [_size(path) for path in paths]
            if sizes == last and all(now > then for now, then in zip(sizes, before, strict=True)):
                return


def _with_departure(fate: Fate, departure: Departure | None) -> Fate:
    return Fate(fate.rank, fate.pid, fate.beat, fate.exit_code, departure, fate.stopped)


def _send(process: BaseProcess, number: signal.Signals) -> None:
    if process.exitcode is None and process.pid is not None:  # not yet reaped: the number is still its own
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _ask_for_stacks(pid: int) -> None:
    """Tell the main thread itself: another one would show where that one has got to in the meantime."""
    ctypes.CDLL(None).tgkill(pid, pid, SHOW_STACKS)


def _is_stopped(process: BaseProcess) -> bool:
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
