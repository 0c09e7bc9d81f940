"""One run as its files show it: history, result, status, config and environment.

Owns which files belong together. Reads only; missing files are empty, damaged content is left out with a
warning.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.config.codec import decoded
from launcher.config.schema import typed_leaves
from launcher.errors import counted, first_line
from launcher.report.event_history import EventHistory, read_history
from launcher.report.reading import json_of, result_of, status_of, text_of, warn
from launcher.report.run_state import ENDED, GOING, RunState
from launcher.run_dir.lock import Holder, holder_of
from launcher.run_dir.records import CONFIG, ENVIRONMENT, OVERRIDES, RESULT
from launcher.run_dir.result import Result
from launcher.run_dir.status import FILE_NAME as STATUS
from launcher.run_dir.status import Status
from launcher.telemetry.event_log import FILE_NAME
from launcher.telemetry.events import EndEvent, StartEvent
from launcher.telemetry.formatting import metric_title

MARKS = (FILE_NAME, STATUS, RESULT, ENVIRONMENT)  # of a run, any of them; a folder of configs has none
Process = tuple[Holder | None, bool | None]  # of a run, and whether it has ended; None if unknown


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    directory: Path
    name: str
    history: EventHistory
    result: Result
    status: Status
    life: RunState
    environment: dict[str, object] = field(default_factory=dict)
    config_text: str = ""
    config: dict[str, str] = field(default_factory=dict)  # by dotted key, as the user asked for it
    overrides: dict[str, str] = field(default_factory=dict)  # of the defaults, by key
    classification_report: str = ""

    @classmethod
    def read(cls, run_dir: Path) -> Run:
        """Read the files. Raises OSError."""
        process = process_of(run_dir)
        history = read_history(run_dir)
        if history.num_damaged:
            warn(f"{run_dir / FILE_NAME} is damaged: left out {counted(history.num_damaged, 'line')}")
        config_text = text_of(run_dir / CONFIG)
        return replace(
            cls.followed(run_dir, history, process),
            environment=json_of(run_dir, ENVIRONMENT),
            config_text=config_text,
            config=_flat(config_text, run_dir),
            overrides=overrides_of(run_dir),
            classification_report=text_of(run_dir / "classification_report.txt"),
        )

    @classmethod
    def followed(
        cls, run_dir: Path, history: EventHistory, process: Process, now: float | None = None
    ) -> Run:
        """What changes while a run is under way: no config, environment or report. Raises OSError.

        `process` is that of the run, found before `history` was read.
        """
        status, result = status_of(run_dir), decoded(Result, {})
        if status.state not in GOING:  # while it goes on, a result.json is of an earlier process
            result = result_of(run_dir)
        if not status.state and result.state in ENDED:  # the other file was not copied along
            status = Status(state=result.state, exit=result.exit, step=result.steps or 0)
        now = time.time() if now is None else now
        return cls(
            directory=run_dir,
            name="/".join(run_dir.absolute().parts[-2:]),
            history=history,
            result=result,
            status=status,
            life=RunState(now, status, history.last_time, *process),
        )

    @property
    def state(self) -> str:
        """One of ENDED, killed, starting, running, or that the run ended without a result."""
        return self.life.name

    @property
    def error(self) -> str:
        """Why it failed or stopped; "" if it did not, or could not write it."""
        if self.state not in ENDED or self.state == "done":
            return ""
        end = self.history.last(EndEvent)
        return self.result.error or (end.error if end else None) or ""

    @property
    def note(self) -> str:
        """What to know of a run whose end is not in its files, or that shows no sign of life; else ""."""
        return self.life.note(self.directory)

    @property
    def seed(self) -> str:
        return self.overrides.get("seed") or self.config.get("seed", "-")

    @property
    def metric_name(self) -> str | None:
        """What runs are compared by: what the recipe names, else the accuracy, else the loss."""
        start = self.history.last(StartEvent)
        named = self.result.metric_name or (start.monitor if start else None)
        return named or next(
            (name for name in ("accuracy", "val_loss") if self.history.evaluation(name)), None
        )

    @property
    def metric(self) -> float | None:
        if self.result.metric is not None:
            return self.result.metric
        curve = self.history.evaluation(self.metric_name or "")
        return None if curve is None else curve.last

    @property
    def metric_label(self) -> str:
        """The title of `metric_name`, with its set where there are several; "" without one."""
        name, sets = self.metric_name or "", self.history.sets
        has_set = not name or not sets or any(name.startswith(f"{each}/") for each in sets)
        return metric_title(name) if has_set else f"{sets[0]}/{metric_title(name)}"

    @property
    def steps(self) -> int:
        """Steps done."""
        last, end = self.history.last_step, self.history.last(EndEvent)
        known = (self.result.steps or 0, self.status.step, *(event.step for event in (last, end) if event))
        return max(known)

    @property
    def total_steps(self) -> int | None:
        start = self.history.last(StartEvent)
        return self.status.total_steps or (start.total_steps if start else None) or None

    @property
    def seconds(self) -> float | None:
        """Training time; of a run without a result, the time since its first start."""
        began, last = self.history.began, self.history.last_time
        if self.result.training_seconds is not None or began is None or last is None:
            return self.result.training_seconds
        return last - began

    @property
    def samples_per_s(self) -> float | None:
        found = self.result.samples_per_s
        return self.history.steps["samples_per_s"].mean_after_first if found is None else found

    @property
    def skipped(self) -> int | None:
        last = self.history.last_step
        if self.result.skipped_steps is not None or last is None:
            return self.result.skipped_steps
        return last.skipped

    @property
    def bound(self) -> str:
        """What bounds the step: input, communication, update, overhead or compute."""
        shares = self.history.time_shares
        return "" if shares is None else shares.verdict.partition(":")[0].removesuffix("-bound")


def overrides_of(run_dir: Path) -> dict[str, str]:
    """What the run was started with, by key. Raises OSError."""
    lines = text_of(run_dir / OVERRIDES).splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in MARKS)


def process_of(run_dir: Path) -> Process:
    """The process that the run belongs to and whether it has ended; to be read before the run's files."""
    try:
        holder = holder_of(run_dir)
    except OSError:
        holder = None
    return holder, None if holder is None else holder.has_ended


def _flat(text: str, run_dir: Path) -> dict[str, str]:
    """config.yaml by dotted keys; empty where it cannot be read."""
    import yaml

    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        warn(f"{run_dir / CONFIG} is damaged: not compared ({first_line(error)})")
        return {}
    return typed_leaves(tree) if isinstance(tree, dict) else {}
