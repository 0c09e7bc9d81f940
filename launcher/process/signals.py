"""Which signals request what of a run: to stop, or to save and continue. Each process has its own handlers.

Imports no torch: parent and workers take the same signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

# SIGXCPU is sent by schedulers before a time limit ends a job.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
SAVING = (signal.SIGUSR1, signal.SIGUSR2)
HEEDED = (*STOPPING, *SAVING)
STACKS = signal.SIGRTMIN  # to a worker of parent mode: write the stacks of all its threads
# Others that would end a process: the one that a run is started from takes them for a request to stop. Left
# out are those of a crash, which no handler in Python can survive.
FATAL = tuple(
    number
    for name in ("ALRM", "VTALRM", "PROF", "IO", "PWR", "TRAP", "STKFLT")
    if (number := getattr(signal, f"SIG{name}", None)) is not None
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
    """In a process that was forked with HEEDED blocked: handle signals as at the start of a program."""
    for number in (*HEEDED, *FATAL):
        if signal.getsignal(number) != signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    take_early()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEEDED)


def unhandled() -> tuple[signal.Signals, ...]:
    """The signals of FATAL for which nobody, such as a profiler or the user's timer, has a handler."""
    return tuple(number for number in FATAL if signal.getsignal(number) in (signal.SIG_DFL, exit_early))


def saving_stops(preempt_signals: str) -> bool:
    """Whether SAVING ask to stop, as launch.preempt_signals says: schedulers send them before the end."""
    return preempt_signals == "stop" or (preempt_signals == "auto" and "SLURM_JOB_ID" in os.environ)
