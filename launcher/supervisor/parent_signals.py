"""Requests to the parent by signals: to stop, or to write a checkpoint.

Owns the parent's handlers. A handler only records the signal; the loop that monitors the workers acts on it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from launcher.process.signals import HEEDED, ONE_REQUEST_S, SAVING, obeyed, unhandled


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


@contextmanager
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


@contextmanager
def held_back() -> Iterator[None]:
    """Block the heeded signals, in this process and in those that it forks, within the context.

    A forked worker keeps them blocked until it can take them as requests.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
