"""Signals as requests to a run: to stop, or to save and continue. The one table, and every handler.

A handler only sets a flag. In a parent the loop that watches the workers passes it on; in a rank it travels
with the totals of the step in progress, and all ranks act on it after the same step. Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from enum import Enum
from types import FrameType

from launcher.errors import Interrupted


class Action(Enum):
    """What a signal asks for."""

    STOP = "save, then stop with exit code 75"
    SAVE = "save, then continue"


ACTION = {
    signal.SIGTERM: Action.STOP,
    signal.SIGINT: Action.STOP,
    signal.SIGHUP: Action.STOP,
    signal.SIGXCPU: Action.STOP,  # schedulers send it before a time limit ends a job
    signal.SIGUSR1: Action.SAVE,
    signal.SIGUSR2: Action.SAVE,
}
HANDLED = tuple(ACTION)
STOPPING = tuple(number for number, action in ACTION.items() if action is Action.STOP)
SAVING = tuple(number for number, action in ACTION.items() if action is Action.SAVE)
DUMP_STACKS_SIGNAL = signal.SIGRTMIN  # to a worker of parent mode: write the stacks of all its threads
ONE_REQUEST_S = 1.0  # a terminal and torchrun both pass the same Ctrl-C on
# Set by schedulers for a job, which end it by a signal.
SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST")


def handled_signals() -> tuple[signal.Signals, ...]:
    """HANDLED, except a SIGHUP that was ignored when this process was started, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in HANDLED if not (ignored and number == signal.SIGHUP))


def save_means_stop(preempt_signals: str) -> bool:
    """Whether the signals in SAVING, which schedulers send before the end, ask to stop."""
    return preempt_signals == "stop" or (preempt_signals == "auto" and "SLURM_JOB_ID" in os.environ)


def is_preemption(stop: signal.Signals | None) -> bool:
    """Whether a stop is a scheduler's doing rather than a person's. `stop` None: another rank received it."""
    return stop != signal.SIGINT and any(name in os.environ for name in SCHEDULERS)


class StopSignal:
    """The requests by signals that this process has received.

    `interrupts`: a second Ctrl-C raises Interrupted in the main thread, which may be in code of the user.
    """

    def __init__(self, save_means_stop: bool = False, interrupts: bool = False) -> None:
        self.stop: signal.Signals | None = None  # the first signal that asked for it
        self.force_quit = False  # Ctrl-C was pressed again
        self._save_means_stop = save_means_stop
        self._received: list[signal.Signals] = []
        self._save = False
        self._interrupts = interrupts
        self._stopped_s = 0.0

    def handler(self, number: int, frame: FrameType | None = None) -> None:
        """Record a signal. A second Ctrl-C is acted on at once."""
        received = signal.Signals(number)
        self._received.append(received)
        if ACTION[received] is Action.SAVE and not self._save_means_stop:
            self._save = True
        elif self.stop is None:
            self.stop, self._stopped_s = received, time.monotonic()
        elif received == signal.SIGINT and time.monotonic() - self._stopped_s > ONE_REQUEST_S:
            first, self.force_quit = not self.force_quit, True
            if first and self._interrupts:
                raise Interrupted

    def pop_received(self) -> list[signal.Signals]:
        """The signals received since the last call, for a parent to pass on."""
        received, self._received = self._received, []
        return received

    def pop_save(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        requested, self._save = self._save, False
        return requested


@contextlib.contextmanager
def signal_handlers_installed(stop_signal: StopSignal, alone: bool = True) -> Iterator[None]:
    """Record signals in `stop_signal` within the context, in the main thread.

    Processes that code of the user forks get the default handlers. After a request to stop, a process that is
    `alone`, or a parent, ignores further ones until it ends: its exit code and its files are being written.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread may set handlers
        return
    _restore_in_forks()
    before = {number: signal.signal(number, stop_signal.handler) for number in handled_signals()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # the parent may have blocked them until now
    try:
        yield
    finally:
        ignored = alone and stop_signal.stop is not None
        for number, handler in before.items():
            usual = signal.SIG_DFL if handler is None else handler
            signal.signal(number, signal.SIG_IGN if ignored else usual)


@functools.cache
def _restore_in_forks() -> None:
    """Take the handlers of this module from forked children: they would swallow what is to end a child.

    `multiprocessing.Pool.terminate` sends SIGTERM and waits. A request to save is not for them: ignored.
    """

    def restore() -> None:
        for number in HANDLED:
            if isinstance(getattr(signal.getsignal(number), "__self__", None), StopSignal):
                usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if number in SAVING else usual)

    os.register_at_fork(after_in_child=restore)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the handled signals, in this process and in those that it forks, within the context.

    A forked worker keeps them blocked until it installs its own handlers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_saving_signals() -> None:
    """Until a job installs its handlers there is nothing to save; a scheduler's request is one to stop."""
    if not save_means_stop("auto"):
        for number in SAVING:
            signal.signal(number, signal.SIG_IGN)


def reset_handlers() -> None:
    """Handle signals as at the start of a program, in a process that was forked with HANDLED blocked."""
    for number in HANDLED:
        if signal.getsignal(number) != signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    ignore_saving_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def ignore_sigterm_of_torchrun() -> None:
    """Keep this process's exit code: torchrun sends SIGTERM to all ranks as soon as the first has exited."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def kill_self_with(number: int) -> None:
    """Under `wandb agent` end this process by the signal itself; elsewhere do nothing.

    A shell shows the same exit code, 128 + number. The agent counts each exit code above 0 as a failure of
    the run, also of one that it has stopped itself, and gives up after three within its first minute.
    """
    if "WANDB_SWEEP_PARAM_PATH" in os.environ:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
