"""Which signals request what of a run: to stop, or to save and continue. Each process has its own handlers.

Owns those of a parent, which only record the signal; the loop that monitors the workers acts on it. Imports
no torch: parent and workers take the same signals.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

# SIGXCPU is sent by schedulers before a time limit ends a job.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
SAVING = (signal.SIGUSR1, signal.SIGUSR2)
HEEDED = (*STOPPING, *SAVING)
STACKS = signal.SIGRTMIN  # to a worker of parent mode: write the stacks of all its threads
# Others that would end a process: the one that a run is started from takes them for a request to stop. Left
# out are those of a crash, which no handler in Python can survive. abort() ends the process after a handler.
FATAL = tuple(
    signal.Signals[f"SIG{name}"] for name in ("ALRM", "VTALRM", "PROF", "IO", "PWR", "TRAP", "STKFLT", "ABRT")
)
ONE_REQUEST_S = 1.0  # a terminal and torchrun both pass the same Ctrl-C on


def obeyed() -> tuple[signal.Signals, ...]:
    """HEEDED, except a SIGHUP that was ignored when this process was started, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in HEEDED if not (ignored and number == signal.SIGHUP))


def exit_early(number: int, frame: FrameType | None) -> None:
    """The handler before a run: exit as the signal would, with a reason.

    An exception might not pass through an import.
    """
    text = (
        f"error: stopped by {signal.Signals(number).name} while nothing was trained; no progress is lost. "
        "To start or resume, run the same command again.\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    end_by(number)
    os._exit(128 + number)


def end_by(number: int) -> None:
    """Under `wandb agent` end this process by the signal itself; elsewhere do nothing.

    A shell shows the same exit code, 128 + number. The agent counts each exit code above 0 as a failure of
    the run, also of one that it has stopped itself, and gives up after three within its first minute.
    """
    if "WANDB_SWEEP_PARAM_PATH" in os.environ:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)


def take_early() -> None:
    """Handle signals that arrive while nothing is trained: a job installs its own handlers."""
    # Before the config is read. To save is no request while there is nothing to save.
    stopping = set(STOPPING) - {signal.SIGINT} | set(SAVING if saving_stops("auto") else ())
    for number in SAVING:
        signal.signal(number, signal.SIG_IGN)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return  # torchrun reports it, and a handler would have to wait for store calls
    for number in (*stopping, *FATAL):
        # nohup ignores SIGHUP
        if number in SAVING or signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, exit_early)


def start_over() -> None:
    """Handle signals as at the start of a program, in a process that was forked with HEEDED blocked."""
    for number in (*HEEDED, *FATAL):
        if signal.getsignal(number) != signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    take_early()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)


def unhandled() -> tuple[signal.Signals, ...]:
    """The signals of FATAL for which nobody, such as a profiler or the user's timer, has a handler."""
    free = [number for number in FATAL if signal.getsignal(number) in (signal.SIG_DFL, exit_early)]
    # A worker's faulthandler writes the stack of an abort(), and is not in Python's table of handlers.
    return tuple(number for number in free if not (number == signal.SIGABRT and faulthandler.is_enabled()))


def saving_stops(preempt_signals: str) -> bool:
    """Whether SAVING ask to stop, as launch.preempt_signals says: schedulers send them before the end."""
    return preempt_signals == "stop" or (preempt_signals == "auto" and "SLURM_JOB_ID" in os.environ)


class Signals:
    """The signals that have arrived, and the first of them that asked to stop."""

    def __init__(self, saving_stops: bool = False) -> None:
        self.stop: signal.Signals | None = None
        self._saving_stops = saving_stops
        self._arrived: list[signal.Signals] = []
        self.obeyed = obeyed()
        self._asked_s = 0.0
        self.impatient = False  # Ctrl-C was pressed again: do not wait for the workers

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The handler."""
        arrived = signal.Signals(number)
        now = time.monotonic()
        if self.stop is None and (self._saving_stops or arrived not in SAVING):
            self.stop, self._asked_s = arrived, now
        elif arrived == signal.SIGINT and now - self._asked_s > ONE_REQUEST_S:
            self.impatient = True
        self._arrived.append(arrived if arrived in HEEDED else signal.SIGTERM)

    def take(self) -> list[signal.Signals]:
        """What the workers are to be sent for the signals that have arrived since the last call."""
        taken, self._arrived = self._arrived, []
        return taken


@contextlib.contextmanager
def heeded(saving_stops: bool = False) -> Iterator[Signals]:
    """Record signals within the context; those not taken by its end are dropped.

    After a request to stop they stay ignored: the run's end is being written, and another Ctrl-C would
    replace its exit code.
    """
    signals = Signals(saving_stops)
    before = {number: signal.signal(number, signals.receive) for number in (*signals.obeyed, *unhandled())}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if signals.stop is None else signal.SIG_IGN)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block the heeded signals, in this process and in those that it forks, within the context.

    A forked worker keeps them blocked until it can take them as requests.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
