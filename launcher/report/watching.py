"""What `watch` shows of a run or a sweep: one screen, or one line.

Owns the texts. Reads the files of the run and never writes to it; the command owns the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.config.messages import command_name, directory_override
from launcher.errors import PRUNED, TO_RESUME, counted, listed
from launcher.report.comparison import TABLE, job_directories, jobs_of
from launcher.report.event_history import HistoryReader
from launcher.report.overview import first_line, printable, shortened, state_text
from launcher.report.run import Run, process_of
from launcher.report.run_state import ENDED, GOING, KILLED, NO_RESULT
from launcher.run_dir.result import PREEMPTED, STOPPED
from launcher.telemetry.events import GpuEvent, WarningEvent
from launcher.telemetry.formatting import duration, metric, number, percent, step_details

STATES = (*ENDED, KILLED, NO_RESULT, "running")  # in the order in which a sweep counts them
RESTART_GRACE_S = 15.0  # for which a run that was killed may still be restarted, as by torchrun
BAR = 20  # characters, each 5 % of the run
LONGEST_NAME = 40  # characters of a job's name, of which the end is shown
SHOWN_JOBS = 5  # that are left
# Without a running job and a comparison, after which a sweep has ended: its next job starts sooner
QUIET_S = 60.0


class RunView:
    """Follows the files of one run: `record` is what they said when last viewed. Raises OSError."""

    record: Run

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = HistoryReader(directory)

    def view(self, now: float | None = None) -> RunView:
        """Read what is new. Files that are missing are empty."""
        process = process_of(self.directory)  # before its files: one that has ended has written all of them
        self.record = Run.followed(self.directory, self._reader.poll(), process, now)
        return self

    def poll(self) -> bool:
        """Read what is new; whether the run has ended."""
        return self.view().has_ended

    def screen(self) -> list[str]:
        return run_screen(self)

    def lines(self) -> list[str]:
        return [run_line(self)]

    @property
    def has_ended(self) -> bool:
        """Whether the run is over: its process, which may restart it, has ended or is unknown."""
        life = self.record.life
        if self.state in GOING or life.holder_has_ended is False:
            return False
        return self.state != KILLED or life.age_s is None or life.age_s >= RESTART_GRACE_S

    @property
    def state(self) -> str:
        return self.record.state

    @property
    def exit_code(self) -> int:
        return self.record.life.exit_code

    @property
    def eta_s(self) -> float | None:
        life = self.record.life
        if self.state != "running" or life.silent_s or life.status.eta_s is None:
            return None
        return max(0.0, life.status.eta_s - (life.now - (life.status.updated or life.now)))


class SweepView:
    """Follows the jobs of a sweep, as they appear."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs: dict[str, RunView] = {}  # by name of the directory
        self._quiet_since: float | None = None
        self._over = False

    def poll(self) -> bool:
        """Read what is new; whether all jobs have ended and the comparison is written, or none runs."""
        _, is_killed = process_of(self._directory)  # before the files, as of a run
        for directory in job_directories(self._directory):
            if directory.name not in self._runs:
                self._runs[directory.name] = RunView(directory)
        polled = [run.poll() for run in self._runs.values()]  # all of them, also after one that is going
        going = any(run.state in GOING for run in self._runs.values())
        ended = all(polled) or (is_killed is True and not going)
        now = time.monotonic()
        self._quiet_since = (self._quiet_since or now) if ended else None
        compared = (self._directory / TABLE).exists()
        is_quiet = now - (self._quiet_since or now) > QUIET_S
        self._over = ended and (compared or is_killed is True or is_quiet)
        return self._over

    def screen(self) -> list[str]:
        return self.lines()

    def lines(self) -> list[str]:
        return [*sweep_screen([*self._runs.values()], self._waiting()), *self._rest()]

    @property
    def exit_code(self) -> int:
        """The first code of a job that failed."""
        failed = (code for run in self._runs.values() if (code := run.exit_code) not in (0, PRUNED))
        return next(failed, 1 if self._rest() else 0)

    def _waiting(self) -> int:
        """How many jobs are planned and have written nothing."""
        return len(jobs_of(self._directory).keys() - self._runs.keys())

    def _rest(self) -> list[str]:
        """What is left of a sweep that has ended before its last job, and the command that runs it."""
        return rest_of_sweep(self._directory, self._runs) if self._over else []


def run_screen(view: RunView) -> list[str]:
    """The lines of a live view of a run."""
    record = view.record
    warning = record.history.last(WarningEvent)
    bottom = [f"warning: {text}"] if warning and (text := first_line(warning.text)) else []
    bottom += [text for text in (first_line(record.error), printable(record.note)) if text]
    leave = ["Ctrl-C leaves; the run continues."] if not (view.has_ended or view.state == KILLED) else []
    return [printable(line) for line in (*_facts(view), *bottom, *leave) if line]


def run_line(view: RunView) -> str:
    """One line, for pipes and logs."""
    record = view.record
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.life.now))
    numbers = f"step {_progress(record)}", _loss(record), *_pace(record), _eta(view)
    return _joined(now, state_text(record), *numbers, first_line(record.error), printable(record.note))


def sweep_screen(views: Sequence[RunView], waiting: int = 0) -> list[str]:
    """One line per job that has started; those that run come first, then those that ended last."""
    counts = {state: sum(view.state == state for view in views) for state in STATES}
    counts["waiting"] = waiting
    head = f"{counted(len(views) + waiting, 'job')}: "
    head += ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    going = [view for view in views if not view.has_ended]
    ended = [view for view in views if view.has_ended]
    width = max((len(view.record.directory.name) for view in views), default=0)
    return [head, *(job_line(view, width) for view in (*going, *reversed(ended)))]


def rest_of_sweep(directory: Path, views: Mapping[str, RunView]) -> list[str]:
    """What a sweep has planned and not done, and the command that continues it; empty if nothing is left.

    Jobs that have failed are not left: the same command would fail again.
    """
    jobs = jobs_of(directory)
    unfinished = (KILLED, NO_RESULT, STOPPED, PREEMPTED)
    left = [name for name in jobs if name not in views or views[name].state in unfinished]
    if not left:
        return []
    return [
        f"{counted(len(jobs), 'job')} planned, {len(left)} left: {printable(listed(left, SHOWN_JOBS))}",
        printable(f"to continue: {command_name()} -m {directory_override('sweep.resume', directory)}"),
    ]


def job_line(view: RunView, longest_name: int = 0) -> str:
    """One line of a sweep, with the names of its jobs in a column."""
    record = view.record
    name = shortened(record.directory.name, LONGEST_NAME).ljust(min(longest_name, LONGEST_NAME))
    # Of a job that was stopped without how to resume it alone: the sweep's command resumes all.
    error = first_line(record.error).partition(f" {TO_RESUME}")[0]
    numbers = _progress(record), _loss(record), _metric(record), _eta(view)
    return _joined(name, state_text(record), *numbers, error)


def _facts(view: RunView) -> Iterator[str]:
    record = view.record
    last = record.history.last_step
    yield f"{record.name}  {state_text(record)}"
    yield _joined(_bar(record), _eta(view))
    yield _joined(_loss(record), _metric(record), f"lr {number(last and last.lr)}")
    yield _joined(*_pace(record))
    if (shares := record.history.time_shares) is not None:
        yield f"step {number(shares.step_ms)} ms  {shares.verdict.partition(':')[0]}"
    yield from _gpus(record)


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _bar(record: Run) -> str:
    total = record.total_steps
    text = f"step {_progress(record)}"
    if not total:
        return text
    share = min(1.0, record.steps / total)
    return f"{text}  [{'#' * round(BAR * share):-<{BAR}}] {percent(share)}"


def _eta(view: RunView) -> str:
    return "" if view.eta_s is None else f"eta {duration(view.eta_s)}"


def _progress(record: Run) -> str:
    total = record.total_steps
    return f"{record.steps:,}" + (f"/{total:,}" if total else "")


def _metric(record: Run) -> str:
    name = record.metric_name
    if name is None or record.metric is None:
        return ""
    return f"{record.metric_label} {metric(name, record.metric)}"


def _pace(record: Run) -> list[str]:
    """Speed, loss scale, skipped steps, as far as they are recorded."""
    last = record.history.last_step
    return [] if last is None else step_details(last)


def _loss(record: Run) -> str:
    last = record.history.last_step
    return f"train_loss {number(last and last.loss)}"


def _gpus(record: Run) -> Iterator[str]:
    last = record.history.last(GpuEvent)
    for gpu in () if last is None else last.gpus:
        shown = [
            f"{factor * value:.0f} {unit}"
            for value, factor, unit in (
                (gpu.utilisation_percent, 1.0, "%"),
                (gpu.power_w, 1.0, "W"),
                (gpu.temperature_c, 1.0, "°C"),
                (gpu.memory_bytes, 1e-9, "GB"),
            )
            if value is not None
        ]
        yield "  ".join([f"GPU {'' if gpu.index is None else gpu.index}:", *shown])
