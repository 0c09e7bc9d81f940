"""`watch`: follows a run or a sweep from its files, live, also one that somebody else has started.

Writes nothing into the run and imports no torch. Ends when the run ends, with its exit code, or with 1 where
it was killed and could write none. Of a sweep with the first code that is not 0; of one that compares
precisions, as `compare` itself, 5 is a finding and no failure. Ctrl-C leaves with 130, the end of a pipe's
reader with 0; the run continues.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from launcher.commands.arguments import Arguments
from launcher.commands.full_screen import Screen, Stop
from launcher.commands.report import checked, warn
from launcher.config.messages import program
from launcher.errors import DIVERGED, ConfigError, StorageError

if TYPE_CHECKING:
    from launcher.report.watching import View

EVERY_S, EVERY_LINE_S = 1.0, 10.0  # on a terminal; elsewhere, where each look is a line
LONGEST_S = 86_400.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
QUIET_S = 60.0  # after which a sweep without a running job has ended


def watch(arguments: Arguments) -> int:
    """Shows how a run or a sweep stands: on a terminal the whole screen, elsewhere a line every 10 seconds.
    It only reads files, so that a run of any machine on the same disk can be watched; Ctrl-C ends the
    watching, and the run continues. Its exit code is that of the run.

      --every SECONDS    the time between two looks, from 0.05 to 86400

    Example: {program} watch outputs/resnet18/20260101-120000-ab12
    """
    from launcher.report.comparison import is_sweep

    if len(arguments.words) != 1:
        raise ConfigError(f"watch: give one run or sweep: {program()} watch outputs/<recipe>/<run>")
    directory = checked("watch", arguments.words[0])
    on_terminal = sys.stdout.isatty()
    every_s = interval(arguments, EVERY_S if on_terminal else EVERY_LINE_S)
    try:
        source = SweepSource(directory) if is_sweep(directory) else RunSource(directory)
        for text in source.warnings():
            warn(text)
        with stopping() as stop:
            if on_terminal:
                with Screen(stop) as screen:
                    follow(source, lambda source: screen.draw(source.screen), every_s, stop)
            else:
                follow(source, show_line, every_s, stop)
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        raise StorageError(f"watch {directory}: {name}{error.strerror or error}.") from error
    if stop.exit_code is not None:
        return stop.exit_code
    if on_terminal:
        print("\n".join(source.lines()))
    return source.exit_code()


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Signals request a stop instead of raising within a write, which would write it twice."""
    stop = Stop()
    before = {
        n: signal.signal(n, lambda n, _: stop.request(128 + n))
        for n in SIGNALS
        if signal.getsignal(n) != signal.SIG_IGN
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RunSource:
    """One run."""

    def __init__(self, directory: Path) -> None:
        from launcher.report.watching import Watched

        self._watched = Watched(directory)
        self.view: View = self._watched.view()

    def poll(self) -> bool:
        """Read what is new; whether the run has ended."""
        self.view = self._watched.view()
        return self.view.has_ended

    def screen(self, columns: int, rows: int) -> list[str]:
        from launcher.report.watching import run_screen

        return run_screen(self.view, columns, rows, has_unicode())

    def warnings(self) -> list[str]:
        """What was left out of metrics.jsonl, as where a newer version wrote it."""
        return self.view.record.recording.warnings

    def lines(self) -> list[str]:
        from launcher.report.watching import run_line

        return [run_line(self.view)]

    def exit_code(self) -> int:
        return self.view.exit_code


class SweepSource:
    """The jobs of a sweep, as they appear."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs: dict[Path, RunSource] = {}
        self._quiet_since: float | None = None
        self._over = False

    def poll(self) -> bool:
        """Read what is new; whether all jobs have ended and the comparison is written."""
        from launcher.report.comparison import TABLE, job_directories

        for directory in job_directories(self._directory):
            if directory not in self._runs:
                self._runs[directory] = RunSource(directory)
        over = [run.poll() for run in self._runs.values()]
        ended = all(over)
        now = time.monotonic()
        self._quiet_since = (self._quiet_since or now) if ended else None
        compared = (self._directory / TABLE).exists()
        self._over = ended and (compared or now - (self._quiet_since or now) > QUIET_S)
        return self._over

    def screen(self, columns: int, rows: int) -> list[str]:
        from launcher.report.watching import sweep_screen

        rest = [line for text in self.rest() for line in wrap(text, columns, break_long_words=False)]
        views = [run.view for run in self._runs.values()]
        return [*sweep_screen(views, columns, rows - len(rest)), *rest]

    def rest(self) -> list[str]:
        """What is left of a sweep that has ended before its last job, and the command that runs it."""
        from launcher.report.watching import rest_of_sweep

        views = {path.name: run.view for path, run in self._runs.items()}
        return rest_of_sweep(self._directory, views) if self._over else []

    def warnings(self) -> list[str]:
        """Return no warnings: `report` prints those of the jobs."""
        return []

    def lines(self) -> list[str]:
        from launcher.report.watching import sweep_screen

        views = [run.view for run in self._runs.values()]
        return [*sweep_screen(views, 400, len(self._runs) + 3), *self.rest()]

    def exit_code(self) -> int:
        """The code of the command that runs the jobs: `compare` takes a divergence for a finding."""
        from launcher.report.comparison import compares_precisions

        findings = (0, DIVERGED) if compares_precisions([*self._runs]) else (0,)
        failed = (code for run in self._runs.values() if (code := run.exit_code()) not in findings)
        return next(failed, 1 if self.rest() else 0)


Source = RunSource | SweepSource


def follow(source: Source, show: Callable[[Source], None], every_s: float, stop: Stop) -> None:
    """Show the source until it ends, a signal arrives, or nobody reads what is shown."""
    while not source.poll():
        show(source)
        if stop.wait(every_s):
            return
        if reader_left():
            stop.request(0)
            return
    show(source)


def reader_left() -> bool:
    """Whether stdout is a pipe without a reader: the streams of this program do not report it."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return False
    return bool(poll.poll(0))


def show_line(source: Source) -> None:
    print("\n".join(source.lines()), flush=True)


def interval(arguments: Arguments, usual_s: float) -> float:
    """The seconds between two looks. Raises ConfigError."""
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
