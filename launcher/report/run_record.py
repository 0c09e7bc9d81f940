"""One run as its files show it: recording, result, status, config and environment.

Owns which files belong together. Reads only; missing files are empty, damaged content is left out with a
warning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.config.trees import typed_leaves
from launcher.errors import first_line
from launcher.report.reading import Warn, json_of, result_of, silent, status_of, text_of
from launcher.report.recording import Recording, read_recording
from launcher.report.run_state import ENDED, RunState
from launcher.run_dir.codec import decoded
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
class RunRecord:
    """The files of a run."""

    directory: Path
    name: str
    recording: Recording
    result: Result
    status: Status
    life: RunState
    environment: dict[str, object] = field(default_factory=dict)
    config_text: str = ""
    config: dict[str, str] = field(default_factory=dict)  # by dotted key, as the user asked for it
    overrides: dict[str, str] = field(default_factory=dict)  # of the defaults, by key
    classification_report: str = ""

    @classmethod
    def read(cls, run_dir: Path, warn: Warn = silent, recording: Recording | None = None) -> RunRecord:
        """Read the files; with `recording` metrics.jsonl has been read. Raises OSError."""
        process = process_of(run_dir)
        recording = read_recording(run_dir) if recording is None else recording
        for text in recording.warnings:
            warn(f"{run_dir}: {text}")
        config_text = text_of(run_dir / CONFIG)
        found = cls.followed(run_dir, recording, process, warn=warn)
        return replace(
            found,
            environment=json_of(run_dir, ENVIRONMENT, warn),
            config_text=config_text,
            config=_as_asked(_flat(config_text, run_dir, warn), recording),
            overrides=overrides_of(run_dir),
            classification_report=text_of(run_dir / "classification_report.txt"),
        )

    @classmethod
    def followed(
        cls,
        run_dir: Path,
        recording: Recording,
        process: Process,
        now: float | None = None,
        warn: Warn = silent,
    ) -> RunRecord:
        """What changes while a run is under way: no config, environment or report. Raises OSError.

        `process` is that of the run, found before `recording` was read.
        """
        now = time.time() if now is None else now
        status, result_written = status_of(run_dir, warn), _written(run_dir / RESULT)
        is_current = result_written > _begin_of(run_dir, status, recording)
        result = result_of(run_dir, warn) if is_current or status.state in ENDED else None
        result_age_s = max(0.0, now - result_written) if result else 0.0
        end, has_status = recording.of(EndEvent).last, (run_dir / STATUS).exists()
        life = RunState(now, status, has_status, result, result_age_s, end, recording.last_time, *process)
        return cls(
            directory=run_dir,
            name="/".join(run_dir.absolute().parts[-2:]),
            recording=recording,
            result=result or decoded(Result, {}),
            status=status,
            life=life,
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
        end = self.recording.of(EndEvent).last
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
        """What runs are compared by, of any set, else the first metric that was evaluated, else the loss."""
        names = list(self.recording.evaluations)
        named = self.result.metric_name or self._compared_by(names)
        if named and (not names or self.recording.evaluation(named) is not None):
            return named
        others = [name for name in names if name != "loss" and not name.startswith("train_")]
        return next(iter([*others, *(name for name in names if name == "loss")]), None)

    def _compared_by(self, evaluated: Sequence[str]) -> str | None:
        """What the recipe names, before there is a result."""
        start = self.recording.of(StartEvent).last
        if not evaluated or start is None:
            return None
        return start.monitor or ("accuracy" if "accuracy" in evaluated else "loss")

    @property
    def metric(self) -> float | None:
        if self.result.metric is not None and self.metric_name == self.result.metric_name:
            return self.result.metric
        curve = self.recording.evaluation(self.metric_name or "")
        return None if curve is None else curve.last

    @property
    def metric_label(self) -> str:
        """The title of `metric_name`, with its set where there are several; "" without one."""
        name, sets = self.metric_name or "", self.recording.sets
        has_set = not name or not sets or any(name.startswith(f"{each}/") for each in sets)
        return metric_title(name) if has_set else f"{sets[0]}/{metric_title(name)}"

    @property
    def steps(self) -> int:
        """Steps done."""
        last, end = self.recording.last_step, self.recording.of(EndEvent).last
        known = (self.result.steps or 0, self.status.step, *(event.step for event in (last, end) if event))
        return max(known)

    @property
    def total_steps(self) -> int | None:
        start = self.recording.of(StartEvent).last
        return self.status.total_steps or (start.total_steps if start else None) or None

    @property
    def seconds(self) -> float | None:
        """Training time; of a run without a result, what its attempts took."""
        if self.result.training_seconds is not None:
            return self.result.training_seconds
        spent = [attempt.ended - attempt.began for attempt in self.recording.attempts]
        return sum(value for value in spent if value > 0) or None

    @property
    def samples_per_s(self) -> float | None:
        found = self.result.samples_per_s
        return self.recording.samples_per_s if found is None else found

    @property
    def skipped(self) -> int | None:
        last = self.recording.last_step
        if self.result.skipped_steps is not None or last is None:
            return self.result.skipped_steps
        return last.skipped

    @property
    def bound(self) -> str:
        """What bounds the step: input, wire, update or compute."""
        shares = self.recording.time_shares
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


def _begin_of(run_dir: Path, status: Status, recording: Recording) -> float:
    """When the run's last process began, in unix seconds: an older result.json is not of this process.

    A process that resumes is "starting" until it has recorded its begin.
    """
    attempts = recording.attempts
    if status.state == "running" and attempts and math.isfinite(attempts[-1].began):
        return attempts[-1].began
    return _written(run_dir / STATUS)


def _written(path: Path) -> float:
    """The time at which the file was written, in unix seconds; 0 without one."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _flat(text: str, run_dir: Path, warn: Warn) -> dict[str, str]:
    """config.yaml by dotted keys; empty where it cannot be read."""
    import yaml

    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        warn(f"{run_dir / CONFIG} is damaged: not compared ({first_line(error)})")
        return {}
    return typed_leaves(tree) if isinstance(tree, dict) else {}


def _as_asked(config: dict[str, str], recording: Recording) -> dict[str, str]:
    """The config without what the run found out for itself, such as a micro-batch that fits."""
    start = recording.of(StartEvent).last
    wishes = (start.asked if start else None) or {}
    return config | {key: text for key, text in typed_leaves(wishes).items() if key in config}
