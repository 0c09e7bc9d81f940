"""What the world outside asks of the parent: to stop, or to have a checkpoint written.

Owns the parent's handlers. A handler notes the signal, nothing more; the loop that watches the workers acts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Signals:
    """The signals that have arrived, and the first of them that asked to stop."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self._arrived: list[signal.Signals] = []
        self._interrupts = 0

    @property
    def impatient(self) -> bool:
        """Whether Ctrl-C was pressed again: the workers are not to be waited for."""
        return self._interrupts >= 2

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The handler."""
        arrived = signal.Signals(number)
        if arrived != signal.SIGUSR1:
            self.stop = self.stop or arrived
        self._interrupts += arrived == signal.SIGINT
        self._arrived.append(arrived)

    def take(self) -> list[signal.Signals]:
        """What has arrived since the last call."""
        taken, self._arrived = self._arrived, []
        return taken

    def handle(self) -> None:
        """Install the handler, whatever was installed in the meantime."""
        for number in HEEDED:
            signal.signal(number, self.receive)


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
