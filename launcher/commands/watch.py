"""`watch`: follows a run or a sweep from its files, live, also one that somebody else has started.

Writes nothing into the run and imports no torch. Ends when the run ends, with its exit code, or with 1 where
it was killed and could write none. Of a sweep with the first code that is not 0; of one that compares
precisions, as `compare` itself, 5 is a finding and no failure. Ctrl-C leaves with 130, the end of a pipe's
reader with 0; the run continues.

On a terminal the view is drawn by rich; where rich is not installed, there is a line every 10 seconds, as in
a pipe.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from launcher.commands.arguments import Arguments
from launcher.commands.report import checked
from launcher.config.messages import install_line, program
from launcher.errors import ConfigError, StorageError
from launcher.launch.config_broadcast import ConfigLeader

if TYPE_CHECKING:
    from launcher.report.watching import RunView, SweepView

EVERY_S, EVERY_LINE_S = "1", "10"  # on a terminal; elsewhere, where each look is a line
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLEEP_S = 0.1  # until a signal is noticed: people take that for at once


def watch(arguments: Arguments, leader: ConfigLeader) -> int:
    """watch RUN [--every SECONDS]: follows a run or a sweep until it ends

    Shows the progress of a run or a sweep: on a terminal a full-screen view (needs rich), otherwise a line
    every 10 seconds. Reads only the files in RUN, so it can run on any machine that mounts RUN. Ctrl-C leaves
    the view; the run continues. When the run ends, so does this command, with the run's exit code.

      --every SECONDS    seconds between two updates, from 0.05 to 86400

    Example: {program} watch outputs/resnet18/20260101-120000-ab12
    """
    from launcher.report.comparison import is_sweep
    from launcher.report.watching import RunView, SweepView

    if len(arguments.words) != 1:
        raise ConfigError(f"watch: give one run or sweep: {program()} watch outputs/<recipe>/<run>")
    directory = checked("watch", arguments.words[0])
    live = sys.stdout.isatty() and find_spec("rich") is not None
    if sys.stdout.isatty() and not live:
        print(f"a line every {EVERY_LINE_S} s; for a live view: {install_line('rich')}")
    usual = EVERY_S if live else EVERY_LINE_S
    (every_s,) = arguments.numbers("--every", usual, is_interval, "seconds from 0.05 to 86400")
    try:
        source = SweepView(directory) if is_sweep(directory) else RunView(directory)
        source.poll()
        # Signals request a stop instead of raising within a write, which would write it twice.
        with stop_on_signal() as stop:
            if live:
                with live_view(source) as show:
                    follow(source, show, every_s, stop)
            else:
                follow(source, lambda: print("\n".join(source.lines()), flush=True), every_s, stop)
    except BrokenPipeError:
        raise  # nobody reads what is shown any more
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        raise StorageError(f"watch {directory}: {name}{error.strerror or error}.") from error
    if stop.exit_code is not None:
        return stop.exit_code
    if live:
        print("\n".join(source.lines()))
    return source.exit_code


def follow(source: RunView | SweepView, show: Callable[[], None], every_s: float, stop: Stop) -> None:
    """Show the source until it ends or a signal arrives."""
    while not source.poll():
        show()
        if stop.wait(every_s):
            return
    show()


def is_interval(seconds: list[float]) -> bool:
    """Whether it is one number of seconds between two updates; one that waits longer has stopped watching."""
    return len(seconds) == 1 and 0.05 <= seconds[0] <= 86_400  # a day


class Stop:
    """A request to leave, with the exit code.

    Not a threading.Event, which a signal handler must not set: the interrupted thread may hold its lock.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None

    def wait(self, seconds: float) -> bool:
        """Whether a stop is requested within the time."""
        end = time.monotonic() + seconds
        while self.exit_code is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLEEP_S))
        return self.exit_code is not None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """A stop that the signals request within the context, but those that are ignored."""
    stop = Stop()

    def request(number: int, frame: object) -> None:
        stop.exit_code = 128 + number

    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, request) for number in heard}
    try:
        yield stop
    finally:
        for number, of_before in before.items():
            signal.signal(number, of_before)


@contextmanager
def live_view(source: RunView | SweepView) -> Iterator[Callable[[], None]]:
    """What draws the source on the whole terminal, which is as before after the context."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:

        def show() -> None:
            live.update(Group(*map(Text, source.screen())), refresh=True)

        yield show
