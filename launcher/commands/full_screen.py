"""The alternate screen of a terminal, and the signals that concern it.

Owns the terminal's state: it is left as it was found, whatever ends or stops the program. Draws at once after
Ctrl-Z and `fg`, and after a change of size; does not draw in the background, over what others write there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor
HOME, TO_LINE_END, TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
USUAL_COLUMNS, USUAL_LINES = 80, 24  # of a terminal that does not report its size
SLEEP_S = 0.1  # until a signal is noticed: people take that for at once


class Stop:
    """A request to leave, with the exit code, or to draw at once.

    Not a threading.Event, which a signal handler must not set: the interrupted thread may hold its lock.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.woken = False

    def request(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def wait(self, seconds: float) -> bool:
        """Whether a stop is requested within the time, which ends early where there is something to draw."""
        end = time.monotonic() + seconds
        while self.exit_code is None and not self.woken and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLEEP_S))
        self.woken = False
        return self.exit_code is not None


@contextmanager
def handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Handle these signals within the context, but those that are ignored."""
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, of_before in before.items():
            signal.signal(number, of_before)


@contextmanager
def full_screen(stop: Stop) -> Iterator[Screen]:
    """What draws on stdout, a terminal, within the context."""
    screen = Screen(stop)
    with handled(
        {signal.SIGTSTP: screen.on_suspend, signal.SIGCONT: screen.wake, signal.SIGWINCH: screen.wake}
    ):
        try:
            yield screen
        finally:
            screen.leave()


class Screen:
    """Draws lines on stdout, a terminal."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._entered = False
        self._suspends = False

    def draw(self, lines_for: Callable[[int, int], list[str]]) -> None:
        """Draw over the last lines; `lines_for` is given the columns and rows, which are asked each time."""
        if self._suspends:
            self._suspend()
        if not _in_foreground():
            return
        if not self._entered:
            self._entered = True
            sys.stdout.write(ENTER)
        size = os.get_terminal_size(sys.stdout.fileno())  # COLUMNS of the environment knows no resize
        lines = lines_for(
            max(8, (size.columns or USUAL_COLUMNS) - 1), max(3, (size.lines or USUAL_LINES) - 1)
        )
        sys.stdout.write(HOME + "".join(f"{line}{TO_LINE_END}\r\n" for line in lines) + TO_SCREEN_END)
        sys.stdout.flush()

    def _suspend(self) -> None:
        """Stop this process, as Ctrl-Z does, with the terminal as it was found; returns when it continues."""
        self._suspends = False
        self.leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self.on_suspend)

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            sys.stdout.write(LEAVE)
            sys.stdout.flush()

    def on_suspend(self, number: int, frame: FrameType | None) -> None:
        self._suspends = self._stop.woken = True  # not here: the handler may interrupt a write

    def wake(self, number: int, frame: FrameType | None) -> None:
        self._stop.woken = True


def _in_foreground() -> bool:
    """Whether the terminal's shell has this process in the foreground; also where it has no jobs."""
    try:
        return os.tcgetpgrp(sys.stdout.fileno()) == os.getpgrp()
    except OSError:  # not the controlling terminal
        return True
