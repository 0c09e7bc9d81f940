"""`watch`: follows a run or a sweep from its files, live, also one that somebody else has started.

Writes nothing into the run and imports no torch. Ends when the run ends, with its exit code, or with 1 where
it was killed and could write none. Of a sweep with the first code that is not 0; of one that compares
precisions, as `compare` itself, 5 is a finding and no failure. Ctrl-C leaves with 130, the end of a pipe's
reader with 0; the run continues.

The terminal is left as it was found, whatever ends or stops the program. The screen is drawn at once after
Ctrl-Z and `fg`, and after a change of size; not in the background, over what others write there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from launcher.commands.arguments import Arguments
from launcher.commands.report import checked, warn
from launcher.config.messages import program
from launcher.distributed.handoff import Leader
from launcher.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from launcher.report.watching import Watched, WatchedSweep

EVERY_S, EVERY_LINE_S = "1", "10"  # on a terminal; elsewhere, where each look is a line
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], None]
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor
HOME, TO_LINE_END, TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
USUAL_COLUMNS, USUAL_LINES = 80, 24  # of a terminal that does not report its size
SLEEP_S = 0.1  # until a signal is noticed: people take that for at once


def watch(arguments: Arguments, leader: Leader) -> int:
    """watch RUN [--every SECONDS]: follows a run or a sweep until it ends

    Shows the progress of a run or a sweep: on a terminal a full-screen view, otherwise a line every 10
    seconds. Reads only the files in RUN, so it can run on any machine that mounts RUN. Ctrl-C leaves the
    view; the run continues. When the run ends, so does this command, with the run's exit code.

      --every SECONDS    seconds between two updates, from 0.05 to 86400

    Example: {program} watch outputs/resnet18/20260101-120000-ab12
    """
    from launcher.report.comparison import is_sweep
    from launcher.report.watching import Watched, WatchedSweep

    if len(arguments.words) != 1:
        raise ConfigError(f"watch: give one run or sweep: {program()} watch outputs/<recipe>/<run>")
    directory = checked("watch", arguments.words[0])
    on_terminal = sys.stdout.isatty()
    usual = EVERY_S if on_terminal else EVERY_LINE_S
    (every_s,) = arguments.numbers("--every", usual, is_interval, "seconds from 0.05 to 86400")
    try:
        source = WatchedSweep(directory) if is_sweep(directory) else Watched(directory)
        source.poll()
        for text in source.warnings():
            warn(text)
        stop = Stop()
        # They request a stop instead of raising within a write, which would write it twice.
        with handled(dict.fromkeys(SIGNALS, lambda number, _: stop.request(128 + number))):
            if on_terminal:
                lines_for = partial(source.screen, braille=has_unicode())
                with full_screen(stop) as screen:
                    follow(source, lambda: screen.draw(lines_for), every_s, stop)
            else:
                follow(source, lambda: print("\n".join(source.lines()), flush=True), every_s, stop)
    except BrokenPipeError:
        raise  # nobody reads what is shown any more
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        raise StorageError(f"watch {directory}: {name}{error.strerror or error}.") from error
    if stop.exit_code is not None:
        return stop.exit_code
    if on_terminal:
        print("\n".join(source.lines()))
    return source.exit_code


def follow(source: Watched | WatchedSweep, show: Callable[[], None], every_s: float, stop: Stop) -> None:
    """Show the source until it ends or a signal arrives."""
    while not source.poll():
        show()
        if stop.wait(every_s):
            return
    show()


def is_interval(seconds: list[float]) -> bool:
    """Whether it is one number of seconds between two updates; one that waits longer has stopped watching."""
    return len(seconds) == 1 and 0.05 <= seconds[0] <= 86_400  # a day


def has_unicode() -> bool:
    """Whether the terminal can show braille dots."""
    encoding = (sys.stdout.encoding or "").lower()
    return encoding.startswith("utf") and os.environ.get("TERM") != "linux"


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
    heard = [number for number in handlers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handlers[number]) for number in heard}
    try:
        yield
    finally:
        for number, of_before in before.items():
            signal.signal(number, of_before)


@contextmanager
def full_screen(stop: Stop) -> Iterator[Screen]:
    """What draws on stdout, a terminal, within the context."""
    screen = Screen(stop)
    with handled(dict.fromkeys((signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH), screen.notice)):
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
        columns, rows = size.columns or USUAL_COLUMNS, size.lines or USUAL_LINES
        lines = lines_for(max(8, columns - 1), max(3, rows - 1))
        sys.stdout.write(HOME + "".join(f"{line}{TO_LINE_END}\r\n" for line in lines) + TO_SCREEN_END)
        sys.stdout.flush()

    def _suspend(self) -> None:
        """Stop this process, as Ctrl-Z does, with the terminal as it was found; returns when it continues."""
        self._suspends = False
        self.leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self.notice)

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            sys.stdout.write(LEAVE)
            sys.stdout.flush()

    def notice(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal by drawing at once; not here, where it may interrupt a write."""
        self._suspends |= number == signal.SIGTSTP
        self._stop.woken = True


def _in_foreground() -> bool:
    """Whether the terminal's shell has this process in the foreground; also where it has no jobs."""
    try:
        return os.tcgetpgrp(sys.stdout.fileno()) == os.getpgrp()
    except OSError:  # not the controlling terminal
        return True
