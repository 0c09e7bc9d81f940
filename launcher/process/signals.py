"""Which signals request what of a run: to stop, or to save and continue. Each process has its own handlers.

Imports no torch: parent and workers take the same signals.
"""

from __future__ import annotations

import signal

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
HEEDED = (*STOPPING, signal.SIGUSR1)
ONE_REQUEST_S = 1.0  # a terminal and torchrun both pass the same Ctrl-C on


def obeyed() -> tuple[signal.Signals, ...]:
    """HEEDED, except a SIGHUP that was ignored when this process was started, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in HEEDED if not (ignored and number == signal.SIGHUP))
