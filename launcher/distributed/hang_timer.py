"""Two threads of each rank: one ends a rank that makes no progress, one keeps waiting ranks alive.

Over NCCL a lost rank raises no error in ranks that wait for it: they block in C code, where no Python signal
handler runs. So no collective has a timeout; instead each rank times its own main thread by its heartbeats,
and one without progress for launch.hang_timeout_s writes its phase and the stacks of all its threads, and
ends with code 6, without waking the main thread. Where there is a parent it times the ranks, and can tell
them apart; under torchrun each rank speaks for itself, and torchelastic ends the others.

Code of the user before the first step and in evaluation hooks may take as long as it likes. Meanwhile its
rank gives signs of life through the store, and for a rank that sees them the time starts again. A rank that
waits there for another one, in a collective or in rank0_first, gives none and is not timed as that code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import select
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.schema import Config
from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import ExitRecord, StoreExitRecords, with_rank
from launcher.distributed.heartbeat import (
    AFTER_A_STEP,
    IN_A_STEP_OR_REPORT,
    WAITING,
    Heartbeat,
    HeartbeatRecord,
    describe,
    limit_s,
    stop_notice,
)
from launcher.distributed.store import ANSWER_S, ignore_store_errors, set_tcp_timeouts
from launcher.errors import StalledError
from launcher.os.lifetime import kill_children
from launcher.os.signals import SAVING, STOPPING, StopSignal, save_means_stop
from launcher.run_dir.records import stacks_path, write_failure
from launcher.run_dir.result import ENDS_ON_REQUEST, Failure
from launcher.run_dir.status import FILE_NAME, state_since
from launcher.user_code import place_of_thread, waits_for_another_rank

if TYPE_CHECKING:
    import torch.distributed as dist

POLL_EVERY_S = 0.5  # of the heartbeat, in memory
SIGN_EVERY_S = 5.0  # between signs of life, each a message to the store; limits are longer
SIGNS_PER_LIMIT = 8  # where launch.hang_timeout_s is short
PAUSE_S = 3.0  # after a longer pause this process itself was stopped
CLEAN_UP_S = 15.0  # for the main thread, once it has failed: aborting a communicator may hang
LINE_AFTER_S = 60.0  # of the user's code: a line says that the ranks wait for it
SAVED_UNTIL = 0.8  # of launch.grace_s: before torchrun or the scheduler kills the rank
WRITE_S = 10.0  # for files and the store, once this rank has decided to exit
ENDED_WELL = ("done", *ENDS_ON_REQUEST)  # states of a run whose result stays

Problem = tuple[str, int]  # what ends this rank, as a sentence, and the exit code

log = logging.getLogger("launcher")


class HangTimer:
    """Times the main thread of this rank within the context. `store` is None for a process alone.

    A process alone waits for nobody and may be debugged, so only two limits hold: that of the user's code,
    and launch.grace_s for a start that goes on after a request to stop.
    """

    def __init__(
        self,
        config: Config,
        launch: LaunchEnv,
        store: dist.Store | None,
        job: str,
        heartbeat: Heartbeat,
        steps_ahead: int = 0,
        stop_signal: StopSignal | None = None,
    ) -> None:
        self._steps_ahead, self._stop_signal = steps_ahead, stop_signal
        self._run_dir, self._limits = Path(config.run.dir), config.launch
        self._launch, self._job, self._heartbeat = launch, job, heartbeat
        self._store = None if heartbeat.monitored_by_parent else store  # a parent times the ranks itself
        self._main_thread = threading.get_ident()
        self._began = time.time()
        self._since_s = time.monotonic()  # of limits: this timer's start, or the latest sign of life
        self._waits = False  # whether this rank is where it may wait for another one
        self._in_wait = False  # whether it is there within the user's code
        self._waited_s = 0.0  # when it last did so in the user's code
        self._failed: tuple[float, ExitRecord] | None = None
        self._stopped: tuple[float, signal.Signals] | None = None
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> HangTimer:
        # Wakes the hang timer. Python accepts only a descriptor that does not block for signal numbers.
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        is_main = threading.current_thread() is threading.main_thread()
        self._answers = is_main and not self._heartbeat.monitored_by_parent  # else the parent answers signals
        if self._answers:
            _reset_wakeup_in_forks()
            self._woken_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            if self._stop_signal is not None and self._stop_signal.stop is not None:  # it came before
                os.write(self._pipe[1], bytes([self._stop_signal.stop]))
        # A separate connection: a wait of the main thread holds the lock of the other one.
        self._connection = self._store.clone() if self._store else None  # type: ignore[attr-defined]
        for name, target in (("hang timer", self._watch), ("signs of life", self._give_signs)):
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._answers:
            signal.set_wakeup_fd(self._woken_before)
        os.write(self._pipe[1], b"\0")
        for thread in self._threads:
            thread.join(ANSWER_S)  # a thread whose store is silent lasts longer, and ends by itself
        for descriptor in self._pipe:
            os.close(descriptor)

    def limit_clean_up(self, record: ExitRecord) -> None:
        """End this rank with the error of `record` unless the context is left soon: NCCL may hang."""
        self._failed = time.monotonic(), record

    def _watch(self) -> None:
        polled_s = time.monotonic()
        while not self._over.is_set():
            self._wait_for_signals()
            now, beat = time.monotonic(), self._latest_beat()
            if now - polled_s > POLL_EVERY_S + PAUSE_S or beat.user_code:
                self._since_s = now
            polled_s = now
            if not self._over.is_set() and (problem := self._problem(beat, now)):
                self._abort(*problem, beat)

    def _latest_beat(self) -> HeartbeatRecord:
        """Where this rank is. It is in the user's code from when it last waited there for another rank."""
        beat = self._heartbeat.latest
        waits = (beat.user_code or self._in_wait) and waits_for_another_rank(self._main_thread)
        # For a parent, which times this rank then. Always written: two threads come here.
        self._in_wait = waits
        self._heartbeat.set_waits(waits)
        beat = self._heartbeat.latest
        self._waits = waits or beat.phase in WAITING
        if waits:
            self._waited_s = time.monotonic()
            return beat
        if beat.user_code:
            return replace(beat, age_s=min(beat.age_s, time.monotonic() - self._waited_s))
        return beat

    def _wait_for_signals(self) -> None:
        """Wait for the next poll. Answers a request to stop at once, while the main thread may be in C."""
        select.select([self._pipe[0]], [], [], POLL_EVERY_S)
        stops = (*STOPPING, *(SAVING if save_means_stop(self._limits.preempt_signals) else ()))
        with contextlib.suppress(BlockingIOError):  # there were none
            received = [number for number in os.read(self._pipe[0], 4096) if number in stops]
            if received and self._stopped is None:
                self._stopped = time.monotonic(), signal.Signals(received[0])
                text = stop_notice(self._heartbeat.latest, self._steps_ahead)
                log.info("rank %d received %s: %s", self._launch.rank, self._stopped[1].name, text)
                if self._launch.rank == 0:
                    _print(text)

    def _problem(self, beat: HeartbeatRecord, now: float) -> Problem | None:
        """Why this rank is to be ended, with the exit code; None while all is well."""
        if self._failed is not None:
            # The error itself, where the main thread has failed and does not come to an end.
            failed_s, record = self._failed
            return None if now - failed_s < CLEAN_UP_S else (with_rank(record, [record]), record.exit_code)
        if late := self._slow_stop(beat, now):
            return late
        if beat.user_code:
            return self._slow_user_code(beat)
        if self._store is None:
            return None  # a parent times it, or nobody waits for it
        return self._no_progress(beat, now)

    def _slow_user_code(self, beat: HeartbeatRecord) -> Problem | None:
        allowed_s = self._limits.user_code_timeout_s
        if allowed_s is None or beat.age_s < allowed_s:
            return None
        limit = f"launch.user_code_timeout_s={allowed_s:g} limits how long it may take."
        return f"{self._in_user_code(beat)}. {limit}", StalledError.exit_code

    def _no_progress(self, beat: HeartbeatRecord, now: float) -> Problem | None:
        """Until the first step all phases together have one limit, from then on each phase has its own."""
        quiet_s = now - self._since_s
        key, limit = "launch.init_timeout_s", self._limits.init_timeout_s
        if beat.has_stepped:
            quiet_s = min(quiet_s, beat.age_s)
            key, limit = "launch.hang_timeout_s", limit_s(beat.phase, self._limits.hang_timeout_s)
        if quiet_s < limit:
            return None
        text = f"rank {self._launch.rank} hangs: {describe(beat)} for {quiet_s:.0f} s{self._place()}."
        return (
            f"{text}{self._of_another()} {key} says how long a rank may be without progress.",
            StalledError.exit_code,
        )

    def _slow_stop(self, beat: HeartbeatRecord, now: float) -> Problem | None:
        """Why a run that was asked to stop ends unsaved: its start, or part of a step, takes nearly grace_s.

        A process alone may take longer over a step, but for its first one, because it saves at its end.
        """
        if self._stopped is None:
            return None
        stopped_s, number = self._stopped
        taken_s = now - stopped_s
        if beat.has_stepped or beat.phase in AFTER_A_STEP:
            if self._store is None or beat.phase not in IN_A_STEP_OR_REPORT:
                return None
            taken_s = min(taken_s, beat.age_s)
        if taken_s < SAVED_UNTIL * self._limits.grace_s:
            return None
        rank = (
            f"rank {self._launch.rank} did not stop, {describe(beat)} for {beat.age_s:.0f} s{self._place()}."
        )
        text = f"stopped by {number.name} before a checkpoint could be written: {rank}{self._of_another()}"
        return text, 128 + number

    def _in_user_code(self, beat: HeartbeatRecord) -> str:
        rank, age_s = self._launch.rank, beat.age_s
        return f"rank {rank} has been in the recipe's code for {age_s:.0f} s, {describe(beat)}{self._place()}"

    def _of_another(self) -> str:
        waits = self._waits and self._store is not None
        return " It waits for another rank, whose own output says where that is." if waits else ""

    def _place(self) -> str:
        place = place_of_thread(self._main_thread)
        return f" at {place}" if place else ""

    def _give_signs(self) -> None:
        """While this rank runs code of the user, say so to the others and to the user; else look for theirs.

        A thread of its own, because a store that does not answer holds it for ever: no more signs come then.
        """
        every_s = min(SIGN_EVERY_S, self._limits.hang_timeout_s / SIGNS_PER_LIMIT)
        key, seen, told = f"job/{self._job}/signs_of_life", 0, False
        with ignore_store_errors():
            if self._connection is not None:
                set_tcp_timeouts(self._limits.hang_timeout_s)
            while not self._over.wait(every_s):
                beat = self._latest_beat()
                long = beat.user_code and beat.age_s >= LINE_AFTER_S
                if long and not told and self._launch.world_size > 1:
                    self._tell_of_user_code(beat)
                told = long
                if self._connection is not None and (beat.user_code or beat.age_s > every_s):
                    signs = self._connection.add(key, int(beat.user_code))
                    if signs > seen:
                        seen, self._since_s = signs, time.monotonic()

    def _tell_of_user_code(self, beat: HeartbeatRecord) -> None:
        limit = self._limits.user_code_timeout_s
        key = f"launch.user_code_timeout_s={'null' if limit is None else f'{limit:g}'}"
        text = f"{self._in_user_code(beat)}. The other ranks wait for it as long as {key} allows."
        log.info(text)
        _print(text)

    def _abort(self, text: str, exit_code: int, beat: HeartbeatRecord) -> None:
        """Record why, and end this process. All is bounded in time: the main thread may hold any lock."""
        # In C, without the GIL: ends the process even if a write below never returns.
        faulthandler.dump_traceback_later(WRITE_S, exit=True, file=2)  # sys.stderr may be None
        rank, stacks = self._launch.rank, stacks_path(self._run_dir, self._launch.rank)
        with contextlib.suppress(OSError), stacks.open("ab") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        text = f"{text} Stacks: {stacks}."
        log.error("rank %d: %s", rank, text)
        record = ExitRecord(rank, time.time(), text, exit_code)
        if self._failed is not None:
            record = replace(self._failed[1], error=text)
        elif beat.user_code:  # it would take as long again
            record = replace(record, restart_helps=False)
        if self._heartbeat.exit_records is not None:
            self._heartbeat.exit_records.write(record)  # the parent prints it
        else:
            self._write_end(Failure("failed", exit_code, text))
            _print(f"error: {text}")
        if self._store is not None:
            # In a thread: over a link that is down, connecting takes longer than this rank has.
            writer = threading.Thread(target=self._write_to_store, args=(record,), daemon=True)
            writer.start()
            writer.join(ANSWER_S)
        kill_children()
        if exit_code > 128 and "WANDB_SWEEP_PARAM_PATH" in os.environ:
            # No failure for wandb's agent: see kill_self_with, whose handlers only the main thread may set.
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(exit_code)

    def _write_end(self, failure: Failure) -> None:
        """Write how the run ended to its files. Any rank does: rank 0 may be the one that cannot run."""
        status = self._run_dir / FILE_NAME
        state = state_since(status, self._began)
        # A rank that has missed the end of the run must not write over it, nor another one over what rank 0
        # has written. Other machines may have disks without these files.
        ended = state in ENDED_WELL or (state == failure.state and self._launch.rank != 0)
        if status.exists() and not ended:
            write_failure(self._run_dir, failure, self._heartbeat.latest.steps_done)

    def _write_to_store(self, record: ExitRecord) -> None:
        """For the other ranks, whose connections break as this one ends."""
        assert self._store is not None
        with ignore_store_errors():
            store = self._store.clone()  # type: ignore[attr-defined]  # other connections may be in use
            StoreExitRecords(store, self._job).write(record)


def _print(line: str) -> None:
    """Write to stderr without the stream's lock, which the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


@functools.cache
def _reset_wakeup_in_forks() -> None:
    """Forked children would write their signals to the same pipe."""
    os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
