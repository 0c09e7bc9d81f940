"""A thread of each rank that ends the rank if its main thread no longer can.

Over NCCL a lost rank raises no error in ranks that wait for it: they block in C code, where no Python signal
handler runs, and torch's watchdog would abort the process without naming a rank. This thread polls for the
failure of another rank, for heartbeats of its main thread, and for signals that the main thread has not
handled. It writes verdict and stacks, and exits without waking the main thread: an aborted collective returns
garbage without an error, which must not be applied or saved.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.schema import Config
from launcher.distributed.env import LaunchEnv, numbered
from launcher.distributed.failures import ASSEMBLE_S, Departure, StoredWords, reason_of, words_of
from launcher.distributed.heartbeat import IN_A_STEP, Beat, Heartbeat, limit_s
from launcher.distributed.roll_call import ANSWER_S, RollCall, last_ranks, missing, who_stalls
from launcher.distributed.store import LEAVE_S, limit_silence, no_store, unless_lost
from launcher.errors import ON_REQUEST, LauncherError, StalledError
from launcher.process.signals import STOPPING
from launcher.run_dir.atomic import open_plain
from launcher.run_dir.records import stacks_path, write_failure
from launcher.run_dir.result import ENDS_ON_REQUEST, Failure
from launcher.run_dir.status import FILE_NAME, state_since

if TYPE_CHECKING:
    import torch.distributed as dist

POLL_EVERY_S = 1.0  # each poll is a message of every rank to the store; limits are of some seconds
SILENT_POLLS = 7  # polls during one call of the store: longer than a roll call takes, ANSWER_S
LEEWAY_S = 2.0  # over Gloo the main thread fails by itself, with more details
SETTLE_S = 3.0  # the same, after another rank has failed
UNRESPONSIVE_S = 5.0  # without a heartbeat after a signal: a slow rank is not lost
ASK_AGAIN_S = 5.0  # between two roll calls of this rank, one of which takes up to ANSWER_S
CLEAN_UP_S = 15.0  # for the main thread, once it has failed: aborting a communicator may hang
PAUSE_S = 3.0  # after a longer pause this process itself was stopped
SAVED_UNTIL = 0.8  # of launch.grace_s: before torchrun or the scheduler kills the rank
PRINT_S = 0.3  # for rank 0 to print why it failed: torchrun ends it once another rank has ended
WRITE_S = 10.0  # for files and the store, once this rank has decided to exit

log = logging.getLogger("launcher")


@dataclass(frozen=True)
class Ending:
    """Why this rank exits, and with which code. Rank `writer` writes the run's files."""

    text: str
    exit_code: int
    writer: int = 0


class Watchdog:
    """Monitors the main thread of this rank within the context. Does nothing if `store` is None."""

    def __init__(
        self, config: Config, launch: LaunchEnv, store: dist.Store | None, job: str, heartbeat: Heartbeat
    ) -> None:
        self._run_dir, self._limits = Path(config.run.dir), config.launch
        self._launch, self._store, self._job = launch, store, job
        self._heartbeat = heartbeat
        self._under_way = False
        self._began = time.time()
        self._failed: tuple[float, BaseException] | None = None
        self._thread: threading.Thread | None = None
        self._asked: tuple[float, signal.Signals] | None = None
        self._other_failed_s: float | None = None
        self._roll_called_s = float("-inf")
        self._polls = 0  # polls of the store so far
        self._is_polling = False  # during one
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        # If there is a parent, it monitors the heartbeats of all ranks and ends them.
        if self._store is not None and not self._heartbeat.watched:
            # Python accepts only a descriptor that does not block for signal numbers.
            self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._woken_before = _wake(self._write)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch_the_store, name="watchdog of the store", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            _wake(self._woken_before)
            self._over.set()
            # Longer if the store is silent: the thread ends by itself.
            self._thread.join(LEAVE_S + CLEAN_UP_S)

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Record a failure of this rank at once, because cleaning up may take long."""
        try:
            yield
        except BaseException as error:
            self._failed = time.monotonic(), error  # first: the store may not answer
            (self._heartbeat.words or words_of(self._store, self._job)).fail(self._launch.rank)
            raise

    def tighten(self) -> None:
        """Apply launch.stall_s from now on: the first step is done."""
        self._under_way = True

    def _watch(self) -> None:
        from torch.distributed import DistError

        assert self._store is not None
        store: dist.Store | None = None
        polled_s = since_s = time.monotonic()
        while not self._over.wait(POLL_EVERY_S):
            self._record_signals()
            now = time.monotonic()
            since_s = now if now - polled_s > POLL_EVERY_S + PAUSE_S else since_s
            beat = self._heartbeat.latest
            beat = replace(beat, age_s=min(beat.age_s, now - since_s))
            self._polls, self._is_polling = self._polls + 1, True
            try:
                if store is None:
                    # A separate connection: a wait of the main thread holds the lock of the other one.
                    store = self._store.clone()  # type: ignore[attr-defined]
                    limit_silence(self._limits.stall_s)
                    roll_call = RollCall(store, self._job, self._launch.rank, self._launch.world_size)
                verdict = self._poll(store, roll_call, beat)
            except DistError:
                verdict = self._lost_store(beat) if self._is_overdue(beat) else None
            if self._failed is not None:
                verdict = self._of_slow_clean_up(*self._failed)
            polled_s = time.monotonic()  # a slow answer of the store does not count as a pause
            self._is_polling = False
            if verdict is not None:
                self._leave(verdict, store)
        if store is not None:
            with contextlib.suppress(DistError):
                roll_call.leave()
        os.close(self._read)
        os.close(self._write)

    def _watch_the_store(self) -> None:
        """End this rank if the store accepts connections but never answers, as on a frozen host.

        A store call then blocks in C without a limit, in the main thread too. Counts polls, not seconds, so
        that after a pause of this process the store has as much time to answer as before.
        """
        silent, previous = 0, 0
        while not self._over.wait(POLL_EVERY_S):
            silent = silent + 1 if self._is_polling and self._polls == previous else 0
            previous = self._polls
            beat = self._heartbeat.latest
            if silent >= SILENT_POLLS and (self._failed is not None or self._is_overdue(beat)):
                self._leave(self._lost_store(beat), None)

    def _record_signals(self) -> None:
        """Record a request to stop: the interpreter writes the numbers of signals to the pipe."""
        with contextlib.suppress(BlockingIOError):  # there were none
            asked = [signal.Signals(number) for number in os.read(self._read, 4096) if number in STOPPING]
            if asked and self._asked is None:
                self._asked = time.monotonic(), asked[0]

    def _poll(self, store: dist.Store, roll_call: RollCall, beat: Beat) -> Ending | None:
        roll_call.answer(beat)
        if self._failed is not None:  # the main thread says why, unless it takes long
            return None
        if verdict := self._of_other_failure(store, beat):
            return verdict
        if not (self._is_overdue(beat) or self._is_unresponsive(beat)):
            return None
        if time.monotonic() - self._roll_called_s < ASK_AGAIN_S:
            return None
        places = roll_call.ask(beat)
        self._roll_called_s = time.monotonic()
        if self._heartbeat.latest.age_s < ANSWER_S:  # the main thread has made progress meanwhile
            return None
        writer = min(places)
        if self._is_overdue(beat) and (text := who_stalls(places, self._launch.world_size, self._under_way)):
            return Ending(text, StalledError.exit_code, writer)
        return self._of_signal(missing(places, self._launch.world_size), places, writer)

    def _is_overdue(self, beat: Beat) -> bool:
        limits = self._limits
        if not self._under_way:
            return beat.age_s >= limits.init_timeout_s + LEEWAY_S
        return beat.age_s >= limit_s(beat.phase, limits.stall_s) + LEEWAY_S

    def _is_unresponsive(self, beat: Beat) -> bool:
        """Whether the main thread has had no heartbeat since it was asked to stop."""
        if self._asked is None or beat.phase not in IN_A_STEP | {"report"}:
            return False
        return min(beat.age_s, time.monotonic() - self._asked[0]) >= UNRESPONSIVE_S

    def _of_slow_clean_up(self, since_s: float, error: BaseException) -> Ending | None:
        if time.monotonic() - since_s < CLEAN_UP_S:
            return None
        code = error.exit_code if isinstance(error, LauncherError) else 1
        return Ending(f"rank {self._launch.rank} failed: {error}", code, self._launch.rank)

    def _of_other_failure(self, store: dist.Store, beat: Beat) -> Ending | None:
        words = StoredWords(store, self._job)
        first = words.first_failure()
        if first is None or first == self._launch.rank:
            return None
        now = time.monotonic()
        self._other_failed_s = self._other_failed_s or now
        if min(now - self._other_failed_s, beat.age_s) < SETTLE_S:
            return None
        text, exit_code = reason_of(words, first)
        # A rank that was asked to end exits after the same step as all others.
        return None if exit_code in ON_REQUEST else Ending(text, exit_code)

    def _of_signal(self, silent: list[int], places: dict[int, Beat | None], writer: int) -> Ending | None:
        """The verdict if this rank was asked to stop and waits for another one, which may have died."""
        if self._asked is None:
            return None
        asked_s, number = self._asked
        stopped = f"stopped by {number.name} before a checkpoint could be written"
        if silent:
            text = f"{numbered(silent)} has died or does not answer; the others were {stopped}."
            return Ending(text, 1, writer)
        late = time.monotonic() - asked_s >= SAVED_UNTIL * self._limits.grace_s
        waits = len(last_ranks(places)) < self._launch.world_size
        if late and waits and (text := who_stalls(places, self._launch.world_size, self._under_way)):
            return Ending(f"{stopped}: {text}", 128 + number, writer)
        return None

    def _lost_store(self, beat: Beat) -> Ending:
        text = f"rank {self._launch.rank} waited for {beat.age_s:.0f} s, and {no_store()}"
        return Ending(text, StalledError.exit_code, self._launch.rank)

    def _leave(self, verdict: Ending, store: dist.Store | None) -> None:
        """Record why, and end this process. All is bounded in time: the main thread may hold any lock."""
        # In C, without the GIL: ends the process even if a write below never returns.
        faulthandler.dump_traceback_later(WRITE_S, exit=True, file=2)  # sys.stderr may be None
        rank = self._launch.rank
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(open_plain(stacks_path(self._run_dir, rank), flags), "ab") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        # A rank that has missed the end of the run must not write over it.
        ended = state_since(self._run_dir / FILE_NAME, self._began) in ("done", *ENDS_ON_REQUEST.values())
        if rank == verdict.writer and not ended:
            failure = Failure("failed", verdict.exit_code, verdict.text)
            write_failure(self._run_dir, failure, self._heartbeat.steps_done)
        if rank == verdict.writer or self._launch.local_rank == 0:
            with contextlib.suppress(OSError):
                os.write(2, f"error: {verdict.text}\n".encode(errors="backslashreplace"))
        if store is not None:
            self._leave_word(store, verdict)
        log.error("rank %d: %s Stacks: %s", rank, verdict.text, stacks_path(self._run_dir, rank))
        for child in multiprocessing.active_children():
            # os._exit runs no exit handlers, which would end the loader processes.
            child.terminate()
        os._exit(verdict.exit_code)

    def _leave_word(self, store: dist.Store, verdict: Ending) -> None:
        """Record, in place of the main thread, that this rank leaves for good and is not to be waited for.

        Returns when all ranks but 0 have done so, or after ASSEMBLE_S. torchrun ends the remaining ranks once
        the first has ended, including rank 0, which might not yet have printed why it failed.
        """
        rank, words = self._launch.rank, StoredWords(store, self._job)
        limit_silence(LEAVE_S)
        with unless_lost():
            # Shared: the text names the rank at fault.
            words.leave(Departure(rank, time.time(), verdict.text, verdict.exit_code, shared=True))
            # Or rank 0 would wait for this rank to confirm the end.
            store.set(f"heard/{rank}", "")
            words.absent(range(1, self._launch.world_size), ASSEMBLE_S)
            time.sleep(PRINT_S)


def _wake(descriptor: int) -> int:
    """Set the descriptor that signal numbers are written to (-1: none); returns the previous one.

    Only the main thread handles signals, and only it may set the descriptor.
    """
    if threading.current_thread() is not threading.main_thread():
        return -1
    _keep_to_this_process()
    return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)


@functools.cache
def _keep_to_this_process() -> None:
    """Reset it in forked children, which would write their signals to the same pipe."""
    os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
