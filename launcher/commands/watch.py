"""`watch`: follows a run or a sweep from its files, live, also one that somebody else has started.

Writes nothing into the run and imports no torch. Ends when the run ends, with its exit code, or with 1 where
it was killed and could write none. Of a sweep with the first code that is not 0; of one that compares
precisions, as `compare` itself, 5 is a finding and no failure. Ctrl-C leaves with 130, the end of a pipe's
reader with 0; the run continues.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from launcher.commands.arguments import Arguments
from launcher.commands.full_screen import Stop, full_screen, handled
from launcher.commands.report import checked, warn
from launcher.config.messages import program
from launcher.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from launcher.report.watching import Watched, WatchedSweep

EVERY_S, EVERY_LINE_S = 1.0, 10.0  # on a terminal; elsewhere, where each look is a line
LONGEST_S = 86_400.0  # a day: one that waits longer has stopped watching
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def watch(arguments: Arguments) -> int:
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
    every_s = interval(arguments, EVERY_S if on_terminal else EVERY_LINE_S)
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
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        raise StorageError(f"watch {directory}: {name}{error.strerror or error}.") from error
    if stop.exit_code is not None:
        return stop.exit_code
    if on_terminal:
        print("\n".join(source.lines()))
    return source.exit_code


def follow(source: Watched | WatchedSweep, show: Callable[[], None], every_s: float, stop: Stop) -> None:
    """Show the source until it ends, a signal arrives, or nobody reads what is shown."""
    while not source.poll():
        show()
        if stop.wait(every_s):
            return
        if reader_left():
            stop.request(0)
            return
    show()


def reader_left() -> bool:
    """Whether stdout is a pipe without a reader: the streams of this program do not report it."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return False
    return bool(poll.poll(0))


def interval(arguments: Arguments, usual_s: float) -> float:
    """The seconds between two updates. Raises ConfigError."""
    given = arguments.flags.get("--every")
    if given is None:
        return usual_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0.05 <= seconds <= LONGEST_S:
        raise ConfigError(f"--every {given}: must be seconds from 0.05 to 86400.")
    return seconds


def has_unicode() -> bool:
    """Whether the terminal can show braille dots."""
    encoding = (sys.stdout.encoding or "").lower()
    return encoding.startswith("utf") and os.environ.get("TERM") != "linux"
