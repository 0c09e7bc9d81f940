"""`watch`: follows a run or a sweep from its files, live, also one that somebody else has started.

Writes nothing into the run and imports no torch. Ends when the run ends, with its exit code, or with 1 where
it was killed and could write none; of a sweep with the first code that is not 0. Ctrl-C leaves with 130, the
end of a pipe's reader with 0; the run continues.

On a terminal the view is drawn by rich; where rich is not installed, there is a line every 10 seconds, as in
a pipe.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

from launcher.commands.arguments import Arguments
from launcher.commands.report import checked
from launcher.config.messages import command_name, install_line
from launcher.errors import ConfigError
from launcher.launch.config_broadcast import ConfigBroadcast

if TYPE_CHECKING:
    from launcher.report.watching import RunView, SweepView

EVERY_S, EVERY_LINE_S = 1.0, 10.0  # on a terminal; elsewhere, where each look is a line

SHORTEST_S = 0.05


def watch(arguments: Arguments, broadcast: ConfigBroadcast) -> int:
    """watch RUN [--every SECONDS]: follows a run or a sweep until it ends

    Shows the progress of a run or a sweep: on a terminal a full-screen view (needs rich), otherwise a line
    every 10 seconds. Reads only the files in RUN, so it can run on any machine that mounts RUN. Ctrl-C leaves
    the view; the run continues. When the run ends, so does this command, with the run's exit code.

      --every SECONDS    seconds between two updates

    Example: {program} watch outputs/resnet18/20260101-120000-ab12
    """
    from launcher.report.comparison import is_sweep
    from launcher.report.watching import RunView, SweepView

    if len(arguments.positionals) != 1:
        raise ConfigError(f"watch: give one run or sweep: {command_name()} watch outputs/<recipe>/<run>")
    directory = checked("watch", arguments.positionals[0])
    live = sys.stdout.isatty() and find_spec("rich") is not None
    if sys.stdout.isatty() and not live:
        print(f"a line every {EVERY_LINE_S:g} s; for a live view: {install_line('rich')}")
    every_s = max(SHORTEST_S, arguments.flags.get("--every", EVERY_S if live else EVERY_LINE_S))
    source = SweepView(directory) if is_sweep(directory) else RunView(directory)
    source.poll()
    with live_view(source) if live else nullcontext(lambda: print_lines(source)) as show:
        while not source.poll():
            show()
            time.sleep(every_s)
        show()
    if live:
        print_lines(source)
    return source.exit_code


def print_lines(source: RunView | SweepView) -> None:
    print("\n".join(source.lines()), flush=True)


@contextmanager
def live_view(source: RunView | SweepView) -> Iterator[Callable[[], None]]:
    """What draws the source on the whole terminal, which is as before after the context."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    for number in (signal.SIGTERM, signal.SIGHUP):  # rich restores the terminal only where Python unwinds
        signal.signal(number, leave)
    with Live(screen=True, auto_refresh=False) as live:

        def show() -> None:
            live.update(Group(*map(Text, source.screen())), refresh=True)

        yield show


def leave(number: int, frame: object) -> None:
    sys.exit(128 + number)
