"""Requests to a running worker by signals: stop, or save and continue.

Owns the handlers while a job runs. A handler only sets a flag; the flag becomes a vote, and all ranks act on
it after the same step. Imports no torch.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from launcher.errors import Interrupted, LauncherError
from launcher.process.signals import FATAL, HEEDED, ONE_REQUEST_S, SAVING, obeyed, unhandled


class Requests:
    """The requests received so far."""

    def __init__(self, saving_stops: bool = False) -> None:
        self.stop: signal.Signals | None = None  # the first signal that asked for it
        self._saving_stops = saving_stops
        self._save = False
        self._interrupted = False
        self._at_once = False
        self._since_s = 0.0

    def take_save(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        asked, self._save = self._save, False
        return asked

    @contextmanager
    def ending_at_once(self, alone: bool) -> Iterator[None]:
        """End a process that is `alone` within the context as soon as it is asked to stop.

        For code of the user before the first step, such as a data set that waits for a process of its own: it
        never reaches the step after which a request is acted on. Nothing is lost there. Raises LauncherError.
        """
        self._at_once = alone
        try:
            if alone and self.stop is not None:
                raise Interrupted
            yield
        except Interrupted:  # no Exception until here: code of the user may catch all of them
            assert self.stop is not None
            stopped = LauncherError(
                f"stopped by {self.stop.name} while the data was being loaded; no progress is lost. To start "
                "or resume, run the same command again."
            )
            stopped.exit_code = 128 + self.stop
            raise stopped from None
        finally:
            self._at_once = False

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The handler. A second SIGINT interrupts at once; a second SIGTERM and a third SIGINT do nothing."""
        if number in SAVING and not self._saving_stops:
            self._save = True
        elif self.stop is None:
            self.stop, self._since_s = signal.Signals(number), time.monotonic()
            if self._at_once:
                raise Interrupted
        elif number == signal.SIGINT and not self._interrupted:
            if time.monotonic() - self._since_s <= ONE_REQUEST_S:
                return
            self._interrupted = True
            raise Interrupted


@contextmanager
def heeded(alone: bool, saving_stops: bool = False) -> Iterator[Requests]:
    """Turn signals into requests within the context, of the main thread.

    `saving_stops`: SIGUSR1 and SIGUSR2 ask to stop too. Processes that user code forks get the default
    handlers. A process that is `alone` has no parent that would record its end: it takes every signal that
    would end it for a request, and ignores further ones after a request to stop.

    A SIGTERM that came too late is raised again at the end, unless this process is `alone`: torchrun sends it
    to the others if a rank has died, and they would wait for the dead one forever.
    """
    requests = Requests(saving_stops)
    if threading.current_thread() is not threading.main_thread():
        yield requests  # no other thread may set handlers
        return
    _restore_in_forks()
    taken = (*obeyed(), *unhandled()) if alone else obeyed()
    before = {number: signal.signal(number, requests.receive) for number in taken}
    too_late = False
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # the parent may have blocked them until now
    try:
        yield requests
    except Exception as error:
        # After a LauncherError all ranks exit the same way, each with its reason.
        too_late = requests.stop == signal.SIGTERM and not (alone or isinstance(error, LauncherError))
        raise
    finally:
        for number, handler in before.items():
            usual = signal.SIG_DFL if handler is None else handler
            signal.signal(number, signal.SIG_IGN if alone and requests.stop else usual)
        if too_late:
            signal.raise_signal(signal.SIGTERM)


@functools.cache
def _restore_in_forks() -> None:
    """Take the handlers of this module from forked children: they would swallow what is to end a child.

    `multiprocessing.Pool.terminate` sends SIGTERM and waits. A request to save is not for them: ignored.
    The signals are blocked during a fork, because one that reached a child before its handlers are restored
    would be swallowed too, and the pool would wait forever.
    """
    masks = threading.local()  # of the threads that are forking

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, (*HEEDED, *FATAL))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def restore() -> None:
        for number in (*HEEDED, *FATAL):
            if isinstance(getattr(signal.getsignal(number), "__self__", None), Requests):
                usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if number in SAVING else usual)
        unblock()

    os.register_at_fork(before=block, after_in_child=restore, after_in_parent=unblock)
