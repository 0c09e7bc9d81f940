"""What `watch` shows of a run or a sweep: one screen, or one line.

Owns the texts and their fit to the terminal. Reads the files of the run and never writes to it; the command
owns the terminal and the clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from launcher.report.reading import json_of, result_of, text_of
from launcher.report.recording import Follower
from launcher.report.run_record import SILENT_S, RunRecord
from launcher.report.run_table import first_line, printable, shortened
from launcher.report.text_plot import plot_lines
from launcher.run_dir.lock import Holder, holder_of
from launcher.run_dir.records import CONFIG, RESULT
from launcher.run_dir.status import FILE_NAME as STATUS
from launcher.telemetry.events import FILE_NAME
from launcher.telemetry.formatting import duration, metric, number, scale_text

ENDED = ("done", "failed", "preempted")
KILLED = 1  # the exit code of a run that could not report one
SETTLE_S = 15.0  # for which a run that failed may still be restarted by its parent
BAR = 20  # characters
MIN_NAME = 10


@dataclass(frozen=True)
class View:
    """What the files say at one moment, `now` in unix seconds."""

    record: RunRecord
    now: float
    may_restart: bool  # by a parent process, after a failure
    result_age_s: float  # since result.json was written; 0 if status.json was written later, or without one
    holder: Holder | None  # the process that the run belongs to; None if unknown
    holder_has_ended: bool | None  # None if unknown; true only if it had before the files were read
    has_status: bool  # whether there is a status.json or a result.json

    @property
    def has_ended(self) -> bool:
        """Whether the run is over; one that failed may be restarted for a while."""
        status = self._end
        updated = status.get("updated", status.get("time"))
        age = self.now - updated if isinstance(updated, int | float) else SETTLE_S
        if self.was_killed:
            return age >= SETTLE_S  # torchrun or a scheduler may start it again
        if status.get("state") not in ENDED:
            return self.holder is None and not self.has_status
        return status["state"] != "failed" or not self.may_restart or age >= SETTLE_S

    @property
    def state(self) -> str:
        """done, failed, preempted, killed, running, or what else the files say."""
        if self.was_killed:
            return "killed"
        return str(self._end["state"]) if self._end.get("state") in ENDED else self.record.state

    @property
    def was_killed(self) -> bool:
        """Whether its process ended without writing the run's end, as by SIGKILL."""
        return self._end.get("state") not in ENDED and bool(self.holder_has_ended)

    @property
    def note(self) -> str:
        """A sentence on a run that shows no sign of life; "" for others."""
        if self.holder is None or self._end.get("state") in ENDED:
            return ""
        updated = self.record.status.get("updated")
        age_s = max(0.0, self.now - updated) if isinstance(updated, int | float) else None
        written = f"{STATUS} was last written {duration(age_s)} ago" if age_s is not None else f"no {STATUS}"
        if self.was_killed:
            return (
                f"process {self.holder.pid} of this run no longer exists, and {written}: it was killed. "
                f"To resume: the same command with run.dir={self.record.directory}"
            )
        if self.holder_has_ended is None and self.record.silent_s(self.now):
            return (
                f"{written}; process {self.holder.pid} of this run is of another machine, or of an earlier "
                "boot of this one, so watch cannot tell whether it still runs."
            )
        return ""

    @property
    def _end(self) -> Mapping[str, Any]:
        """status.json, or what else shows an end that did not get into it, as where the disk was full."""
        status = self.record.status
        if status.get("state") in ENDED:
            return status
        end = self.record.recording.of("end").last
        if end is None:
            is_last = self.result_age_s >= SILENT_S or (self.result_age_s and self.holder_has_ended)
            return self.record.result if is_last else status
        updated, ended = status.get("updated"), end.get("time")
        if not isinstance(updated, int | float) or not isinstance(ended, int | float):
            return end
        resumes = ended < updated and self.now - updated < SILENT_S  # the end is that of an earlier process
        return status if resumes else end

    @property
    def exit_code(self) -> int:
        """Of a run that has ended; KILLED if it could not write one."""
        code = KILLED if self.was_killed else self._end.get("exit")
        return code if type(code) is int and 0 <= code < 256 else 1

    @property
    def eta_s(self) -> float | None:
        eta, updated = self.record.status.get("eta_s"), self.record.status.get("updated")
        if (
            self.record.state != "running"
            or self.was_killed
            or self.record.silent_s(self.now)
            or not isinstance(eta, int | float)
        ):
            return None
        return max(0.0, eta - (self.now - updated if isinstance(updated, int | float) else 0.0))


class Watched:
    """Follows the files of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._follower = Follower(directory / FILE_NAME)
        self._may_restart = "max_restarts: 0" not in text_of(directory / CONFIG)

    def view(self, now: float | None = None) -> View:
        """What the files say. Raises OSError for unreadable ones; those that are missing are empty."""
        now = time.time() if now is None else now
        holder = self._holder()  # before its files: one that has ended has written all of them
        has_ended = None if holder is None else holder.has_ended
        self._follower.poll()
        status = json_of(self.directory, STATUS)
        written, result_written = _written(self.directory / STATUS), _written(self.directory / RESULT)
        result_age_s = max(0.0, now - result_written) if result_written > written else 0.0
        has_result = status.get("state") in ENDED or result_age_s >= SILENT_S or (has_ended and result_age_s)
        record = RunRecord(
            directory=self.directory,
            name="/".join(self.directory.absolute().parts[-2:]),
            recording=self._follower.recording,
            result=result_of(self.directory) if has_result else {},
            status=status,
            environment={},
            config_text="",
            config={},
            classification_report="",
            confusion_picture=b"",
        )
        return View(
            record, now, self._may_restart, result_age_s, holder, has_ended, bool(written or result_written)
        )

    def _holder(self) -> Holder | None:
        """The process that the run belongs to; None where that cannot be read."""
        try:
            return holder_of(self.directory)
        except OSError:
            return None


def _written(path: Path) -> float:
    """When the file was written, in unix seconds; 0 without one."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def run_screen(view: View, columns: int, rows: int, braille: bool = True) -> list[str]:
    """At most `rows` lines of at most `columns` characters."""
    record = view.record
    top = [line for line in _facts(view, columns) if line]
    bottom = [f"warning: {text}"] if (text := _last_warning(record)) else []
    bottom += [text for text in (first_line(record.error), *wrap(view.note, columns)) if text]
    room = rows - len(top) - len(bottom) - 2
    curve = plot_lines(record.recording.steps["loss"], columns, min(room, 16), braille)
    title = ["loss"] if curve else []
    leave = ["Ctrl-C leaves; the run continues."] if not (view.has_ended or view.was_killed) else []
    lines = [*top, *title, *curve, *bottom, *leave]
    return [_cut(line, columns) for line in lines[:rows]]


def run_line(view: View) -> str:
    """One line, for pipes and logs."""
    record = view.record
    last = record.recording.last_step
    parts = [
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.now)),
        state_of(view),
        f"step {_progress(record)}",
        f"loss {number(last.get('loss'))}",
        *_pace(record),
        *([f"eta {duration(view.eta_s)}"] if view.eta_s is not None else []),
        *([first_line(record.error)] if record.error else []),
        *([printable(view.note)] if view.note else []),
    ]
    return "  ".join(parts)


def sweep_screen(views: Sequence[View], columns: int, rows: int) -> list[str]:
    """One line per job; those that have ended are left out first where there is no room."""
    counts = {state: sum(view.state == state for view in views) for state in (*ENDED, "killed", "running")}
    head = f"{len(views)} jobs: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    going = [view for view in views if not view.has_ended]
    ended = [view for view in views if view.has_ended]
    room = max(0, rows - 3)
    shown = set(map(id, [*going, *reversed(ended)][:room]))
    width = max((len(view.record.directory.name) for view in views), default=0)
    lines = [job_line(view, columns, width) for view in views if id(view) in shown]
    left_out = len(views) - len(lines)
    more = [f"and {left_out} more"] if left_out else []
    return [_cut(line, columns) for line in [head, *lines, *more]][:rows]


def job_line(view: View, columns: int, longest_name: int = 0) -> str:
    """One line of a sweep, with the names of its jobs in a column of up to a third of the width."""
    record = view.record
    width = max(MIN_NAME, columns // 3)
    name = shortened(record.directory.name, width)
    parts = [
        name.ljust(min(longest_name, width)),
        state_of(view),
        _progress(record),
        f"loss {number(record.recording.last_step.get('loss'))}",
        *_metric(record),
        *([f"eta {duration(view.eta_s)}"] if view.eta_s is not None else []),
        *([first_line(record.error)] if record.error else []),
    ]
    return "  ".join(parts)


def state_of(view: View) -> str:
    silent_s = 0.0 if view.has_ended else view.record.silent_s(view.now)
    return f"no sign of life for {silent_s:.0f} s" if silent_s else view.state


def _facts(view: View, columns: int) -> Iterator[str]:
    record = view.record
    last = record.recording.last_step
    state = state_of(view)
    yield f"{shortened(record.name, max(MIN_NAME, columns - len(state) - 2))}  {state}"
    yield _bar(view, columns)
    yield "  ".join([f"loss {number(last.get('loss'))}", *_metric(record), f"lr {number(last.get('lr'))}"])
    yield "  ".join(_pace(record))
    yield "  ".join(_time_of_step(record))
    yield from _gpus(record)


def _bar(view: View, columns: int) -> str:
    record = view.record
    total = record.total_steps
    text = f"step {_progress(record)}"
    if total:
        share = min(1.0, record.steps / total)
        done = round(BAR * share)
        bar = f"[{'#' * done}{'-' * (BAR - done)}] {share:.0%}".replace("%", " %")
        text = f"{text}  {bar}" if len(text) + len(bar) + 16 < columns else f"{text}  {share:.0%}"
    return text + (f"  eta {duration(view.eta_s)}" if view.eta_s is not None else "")


def _progress(record: RunRecord) -> str:
    total = record.total_steps
    return f"{record.steps:,}" + (f"/{total:,}" if total else "")


def _metric(record: RunRecord) -> list[str]:
    name = record.metric_name
    if name is None or record.metric is None:
        return []
    return [f"{record.metric_label} {metric(name, record.metric)}"]


def _pace(record: RunRecord) -> list[str]:
    """Speed, loss scale, skipped steps, as far as they are recorded."""
    last = record.recording.last_step
    parts = []
    if _is_number(last.get("samples_per_s")):
        parts.append(f"{last['samples_per_s']:,.0f} samples/s")
    if _is_number(last.get("scale")):
        parts.append(f"scale {scale_text(last['scale'])}")
    if last.get("skipped") is not None:
        parts.append(f"skipped {number(last['skipped'])}")
    return parts


def _time_of_step(record: RunRecord) -> list[str]:
    shares = record.recording.time_shares
    if shares is None:
        return []
    return [f"step {number(shares.step_ms)} ms", shares.verdict.partition(":")[0]]


def _gpus(record: RunRecord) -> Iterator[str]:
    gpus = record.recording.last_gpu.get("gpus")
    for fields in gpus if isinstance(gpus, list) else []:
        if isinstance(fields, dict):
            shown = [
                f"{factor * fields[key]:.0f} {unit}"
                for key, factor, unit in (
                    ("utilisation_percent", 1.0, "%"),
                    ("power_w", 1.0, "W"),
                    ("temperature_c", 1.0, "°C"),
                    ("memory_bytes", 1e-9, "GB"),
                )
                if _is_number(fields.get(key))
            ]
            yield "  ".join([f"GPU {fields.get('index', '')}:", *shown])


def _last_warning(record: RunRecord) -> str:
    last = record.recording.of("warning").last
    return first_line(str(last.get("text"))) if last else ""


def _cut(line: str, columns: int) -> str:
    line = printable(line)
    return line if len(line) <= columns else f"{line[: max(0, columns - 3)]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
