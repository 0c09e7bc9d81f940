"""Requests to a running worker by signals: stop, or save and continue.

Owns the handlers while a job runs. A handler only sets a flag; the flag becomes a vote, and all ranks act on
it after the same step. Imports no torch.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from launcher.errors import LauncherError
from launcher.process.signals import ONE_REQUEST_S, obeyed


class Requests:
    """The requests received so far."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None  # the first signal that asked for it
        self._save = False
        self._since_s = 0.0

    def take_save(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        asked, self._save = self._save, False
        return asked

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The handler. A second SIGINT interrupts at once; a second SIGTERM changes nothing."""
        if number == signal.SIGUSR1:
            self._save = True
        elif self.stop is None:
            self.stop, self._since_s = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since_s > ONE_REQUEST_S:
            raise KeyboardInterrupt


@contextmanager
def heeded(alone: bool) -> Iterator[Requests]:
    """Turn signals into requests within the context. Does nothing outside the main thread.

    A SIGTERM that came too late is raised again at the end, unless this process is `alone`: torchrun sends it
    to the others if a rank has died, and they would wait for the dead one forever.
    """
    requests = Requests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    before = {number: signal.signal(number, requests.receive) for number in obeyed()}
    too_late = False
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # the parent may have blocked them until now
    try:
        yield requests
    except LauncherError:
        raise  # all ranks exit the same way, each with its reason
    except Exception:
        too_late = requests.stop == signal.SIGTERM and not alone
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if too_late:
            signal.raise_signal(signal.SIGTERM)
