"""What the world outside asks of the parent: to stop, or to have a checkpoint written.

Owns the parent's handlers. A handler notes the signal, nothing more; the loop that watches the workers acts.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from launcher.process.signals import HEEDED, ONE_REQUEST_S, obeyed


class Signals:
    """The signals that have arrived, and the first of them that asked to stop."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self._arrived: list[signal.Signals] = []
        self.obeyed = obeyed()
        self._asked_s = 0.0
        self.impatient = False  # Ctrl-C was pressed again: the workers are not to be waited for

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The handler."""
        arrived = signal.Signals(number)
        now = time.monotonic()
        if arrived != signal.SIGUSR1 and self.stop is None:
            self.stop, self._asked_s = arrived, now
        elif arrived == signal.SIGINT and now - self._asked_s > ONE_REQUEST_S:
            self.impatient = True
        self._arrived.append(arrived)

    def take(self) -> list[signal.Signals]:
        """What has arrived since the last call."""
        taken, self._arrived = self._arrived, []
        return taken

    def handle(self) -> None:
        """Install the handler, whatever was installed in the meantime."""
        for number in HEEDED:
            signal.signal(number, self.receive if number in self.obeyed else signal.SIG_IGN)


@contextmanager
def heeded() -> Iterator[Signals]:
    """Note signals while the context lasts; those that nobody took by its end count as obeyed."""
    before = {number: signal.getsignal(number) for number in HEEDED}
    signals = Signals()
    signals.handle()
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """The heeded signals wait, in this process and in those that it forks, until the context ends.

    A forked worker holds them back until it can take them as requests.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
