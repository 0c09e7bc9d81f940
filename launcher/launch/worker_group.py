"""One set of workers, from the fork to the last exit.

Owns their processes, the check of their heartbeats, and their end: workers that are left when an attempt has
failed may wait in a collective, so they have a second to record their ends and are then killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from launcher.distributed.heartbeat import AFTER_A_STEP, HeartbeatRecord, limit_s
from launcher.errors import ON_REQUEST
from launcher.launch.root_cause import HANGING, STOPPED_ON_REQUEST, GroupResult, RankResult
from launcher.launch.worker_process import WorkerSpec
from launcher.os.lifetime import is_stopped, kill_group
from launcher.os.signals import DUMP_STACKS_SIGNAL
from launcher.user_code import place_in_stacks

# Once one worker has failed: for the others to record their errors, and for rank 0 to close its tracker.
ERROR_GRACE_S = 1.0
STACKS_S = 0.5  # for live workers to write their stacks, which takes milliseconds, before they are killed
PAUSE_S = 1.0  # after a longer pause the parent itself was stopped, with its workers


class WorkerGroup:
    """Monitors the workers of one attempt. Call `poll` every fraction of a second.

    Their attempt is over in one of three ways. All have ended. Or a deadline has passed, which the first
    failure, a request to stop, or the end of another machine's workers has set: those left are killed. Or
    they make no progress: they write their stacks and are stopped.
    """

    def __init__(self, processes: Sequence[BaseProcess], work: WorkerSpec, host: str = "") -> None:
        self._processes, self._work, self._host = processes, work, host
        self._first_rank, self._limits = work.heartbeats.first_rank, work.config.launch
        self._group_result: GroupResult | None = None
        self._is_hanging = False
        self._polled_s = self._watched_since_s = time.monotonic()
        self._deadline_s = float("inf")
        self._has_stepped = False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all workers that are left."""
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:  # not reaped: the pid is not reused
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def set_deadline(self, seconds: float) -> None:
        """Set the workers' deadline, unless an earlier one is set."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + seconds)

    def end_like_other_node(self, end: str) -> None:
        """End the workers as those of another machine have ended."""
        self._is_hanging = end == HANGING
        self.set_deadline(self._limits.grace_s if end in (STOPPED_ON_REQUEST, HANGING) else ERROR_GRACE_S)

    def kill(self) -> None:
        """Kill the workers that are left and what they have started; remove stack files never written to."""
        self.send(signal.SIGKILL)
        for process in self._processes:
            if process.pid is not None:  # it could be started
                process.join(5)  # seconds: one in uninterruptible sleep cannot be killed
                kill_group(process.pid)  # its loader processes, and programs of the recipe
        for rank, _ in enumerate(self._processes, self._first_rank):
            path = self._work.stacks_of(rank)
            with contextlib.suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()

    @property
    def furthest(self) -> HeartbeatRecord:
        """The heartbeat of the rank that is furthest ahead."""
        return max(self._work.heartbeats.read(), key=lambda beat: beat.order)

    @property
    def stacks(self) -> Path:
        """The files with the stacks of workers that hang."""
        return self._work.stacks_of(0).with_name("stacks-rank*.txt")

    def poll(self) -> GroupResult | None:
        """The result once the workers have ended, been killed, or stopped as hanging; None while they run."""
        if self._group_result is None:
            self._group_result = self._polled()
        return self._group_result

    def _polled(self) -> GroupResult | None:
        now = time.monotonic()
        if now - self._polled_s > PAUSE_S:
            self._watched_since_s = now
        self._polled_s = now
        exit_codes = [process.exitcode for process in self._processes]
        for code in filter(None, exit_codes):  # of those that have ended, and not well
            self.set_deadline(self._limits.grace_s if code in ON_REQUEST else ERROR_GRACE_S)
        if None not in exit_codes or now >= self._deadline_s:
            return self._ended()
        if self._is_hanging or (self._deadline_s == float("inf") and self._is_overdue(now)):
            return self._hanging()
        return None

    def _is_overdue(self, now: float) -> bool:
        every = self._work.heartbeats.read()
        left = [index for index, process in enumerate(self._processes) if process.exitcode is None]
        if any(self._is_in_user_code(every[index], self._processes[index]) for index in left):
            self._watched_since_s = now  # for as long as it takes: the others wait for it
            return False
        beats = [every[index] for index in left]
        # A rank that evaluates before its first step beats with each batch.
        done = any(beat.has_stepped or beat.phase in AFTER_A_STEP for beat in beats)
        # A rank that has exited will take no first step that others could still wait for.
        self._has_stepped |= done or len(left) < len(self._processes)
        longest = now - self._watched_since_s
        if not self._has_stepped:
            return longest >= self._limits.init_timeout_s
        return any(
            min(beat.age_s, longest) >= limit_s(beat.phase, self._limits.hang_timeout_s) for beat in beats
        )

    def _is_in_user_code(self, beat: HeartbeatRecord, process: BaseProcess) -> bool:
        """Whether a rank runs user code, for which the parent has no limit.

        The rank's own timer limits it (launch.user_code_timeout_s); a stopped process has no timer, so then
        launch.hang_timeout_s holds.
        """
        return beat.user_code and (beat.age_s < self._limits.hang_timeout_s or not is_stopped(process.pid))

    def _ended(self) -> GroupResult:
        results = self._rank_results()
        self.kill()
        # Read after the kill: what a rank has recorded until its end counts.
        records = self._work.heartbeats.exit_records
        return GroupResult([replace(result, record=records.read(result.rank)) for result in results])

    def _hanging(self) -> GroupResult | None:
        """Make live workers write their stacks, and stop them. None if the last ones have just ended."""
        results = self._rank_results()
        if all(result.exit_code is not None for result in results):
            return None
        self.send(signal.SIGCONT)  # a stopped process handles no signal
        self.send(DUMP_STACKS_SIGNAL)
        time.sleep(STACKS_S)
        # Killed by the caller, once all machines know: ranks of others end as soon as a connection breaks,
        # and would write no stacks.
        self.send(signal.SIGSTOP)
        limit = "launch.hang_timeout_s" if self._has_stepped else "launch.init_timeout_s"
        results = [replace(each, place=self._place_of(each.rank)) for each in results]
        return GroupResult(results, limit=limit)

    def _place_of(self, rank: int) -> str:
        """The line of the user's that a rank is in, by the stacks that it has written."""
        with contextlib.suppress(OSError):
            return place_in_stacks(self._work.stacks_of(rank).read_text(errors="replace"))
        return ""

    def _rank_results(self) -> list[RankResult]:
        beats = self._work.heartbeats.read()
        return [
            RankResult(
                rank, each.pid or 0, beat, each.exitcode, is_sigstopped=is_stopped(each.pid), host=self._host
            )
            for rank, (each, beat) in enumerate(zip(self._processes, beats, strict=True), self._first_rank)
        ]
