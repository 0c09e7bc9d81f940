"""One run as its files show it: recording, result, status, config and environment.

Owns the state of a run as reports and `watch` name it. Reads only; missing files are empty, damaged content
is left out with a warning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.report.reading import Warn, bytes_of, json_of, result_of, silent, text_of, training_seconds_of
from launcher.report.recording import Recording, read_recording
from launcher.run_dir.lock import holder_of
from launcher.run_dir.records import CONFIG, ENVIRONMENT, RESULT
from launcher.run_dir.status import FILE_NAME as STATUS
from launcher.telemetry.events import FILE_NAME
from launcher.telemetry.formatting import metric_title

SILENT_S = 60.0  # without a change of status.json after which a run shows no sign of life
MARKS = (FILE_NAME, STATUS, RESULT, ENVIRONMENT)  # of a run, any of them; a folder of configs has none
GOING = ("starting", "running")
CONFUSION_PICTURE = "confusion_matrix.png"


@dataclass(frozen=True)
class RunRecord:
    """The files of a run."""

    directory: Path
    name: str
    recording: Recording
    result: dict[str, Any]
    status: dict[str, Any]
    environment: dict[str, Any]
    config_text: str
    config: dict[str, str]  # by dotted key
    classification_report: str
    confusion_picture: bytes
    holder_has_ended: bool = False  # before the files were read, of a process of this machine

    @classmethod
    def read(cls, run_dir: Path, warn: Warn = silent, recording: Recording | None = None) -> RunRecord:
        """Read the files; with `recording` metrics.jsonl has been read. Raises OSError."""
        holder_has_ended = _holder_has_ended(run_dir)
        recording = read_recording(run_dir) if recording is None else recording
        for text in recording.warnings:
            warn(f"{run_dir}: {text}")
        config_text = text_of(run_dir / CONFIG)
        return cls(
            directory=run_dir,
            name="/".join(run_dir.absolute().parts[-2:]),
            recording=recording,
            result=result_of(run_dir, warn),
            status=json_of(run_dir, STATUS, warn),
            environment=json_of(run_dir, ENVIRONMENT, warn),
            config_text=config_text,
            config=_flat(config_text, run_dir, warn),
            classification_report=text_of(run_dir / "classification_report.txt"),
            confusion_picture=bytes_of(run_dir / CONFUSION_PICTURE),
            holder_has_ended=holder_has_ended,
        )

    @property
    def state(self) -> str:
        """done, failed, preempted, killed, running, or "not finished" where no file says more."""
        if self.status.get("state") in GOING and not self._ended_after_status:
            return "killed" if self.holder_has_ended else str(self.status["state"])
        end = self.recording.of("end").last or {}
        known = (self.result.get("state"), end.get("state"), self.status.get("state"))
        return next((str(state) for state in known if state), "not finished")

    @property
    def _ended_after_status(self) -> bool:
        """Whether the run ended without its last status, as where the disk was full."""
        return self.recording.of("end").last is not None

    def silent_s(self, now: float | None = None) -> float:
        """Seconds for which a run that has not ended shows no sign of life; 0 below `SILENT_S`."""
        updated = self.status.get("updated")
        if self.state not in GOING or not isinstance(updated, int | float):
            return 0.0
        age = (time.time() if now is None else now) - updated
        return age if age >= SILENT_S else 0.0

    @property
    def error(self) -> str:
        """Why it failed or stopped; "" if it did not."""
        end = self.recording.of("end").last or {}
        return str(self.result.get("error") or end.get("error") or "") if self.state != "done" else ""

    @property
    def metric_name(self) -> str | None:
        """What runs are compared by, of any set, else the first metric that was evaluated, else the loss."""
        names = list(self.recording.evaluations)
        named = self.result.get("metric_name") or self._compared_by(names)
        if isinstance(named, str) and (not names or self.recording.evaluation(named) is not None):
            return named
        return next((name for name in names if name != "loss" and not name.startswith("train_")), None) or (
            "loss" if "loss" in names else None
        )

    def _compared_by(self, evaluated: Sequence[str]) -> Any:
        """What the recipe names, before there is a result; None in files of older versions."""
        start = self.recording.of("start").last or {}
        if not evaluated or "compare_by" not in start:
            return None
        return start["compare_by"] or ("accuracy" if "accuracy" in evaluated else "loss")

    @property
    def metric(self) -> Any:
        if self.result.get("metric") is not None and self.metric_name == self.result.get("metric_name"):
            return self.result["metric"]
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
        known = (
            self.result.get("steps"),
            self.status.get("step"),
            self.recording.last_step.get("step"),
            (self.recording.of("end").last or {}).get("step"),
        )
        return max((_count(value) or 0 for value in known), default=0)

    @property
    def total_steps(self) -> int | None:
        start = self.recording.of("start").last or {}
        known = (self.status.get("total_steps"), start.get("total_steps"))
        return next((count for value in known if (count := _count(value))), None)

    @property
    def seconds(self) -> float | None:
        """Training time; of a run without a result, what its attempts took."""
        if (seconds := training_seconds_of(self.result)) is not None:
            return seconds
        spent = [attempt.ended - attempt.began for attempt in self.recording.attempts]
        return sum(value for value in spent if value > 0) or None

    @property
    def samples_per_s(self) -> float | None:
        if isinstance(self.result.get("samples_per_s"), int | float):
            return float(self.result["samples_per_s"])
        return self.recording.samples_per_s

    @property
    def skipped(self) -> int | None:
        known = (self.result.get("skipped_steps"), self.recording.last_step.get("skipped"))
        return next((count for value in known if (count := _count(value)) is not None), None)

    @property
    def bound(self) -> str:
        """What bounds the step: input, wire, update or compute."""
        shares = self.recording.time_shares
        return "" if shares is None else shares.verdict.partition(":")[0].removesuffix("-bound")


def is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in MARKS)


def _holder_has_ended(run_dir: Path) -> bool:
    """Whether the process that the run belongs to is known to have ended."""
    try:
        holder = holder_of(run_dir)
    except OSError:
        return False
    return holder is not None and bool(holder.has_ended)


def _flat(text: str, run_dir: Path, warn: Warn) -> dict[str, str]:
    """config.yaml by dotted keys; empty where it cannot be read."""
    import yaml

    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        warn(f"{run_dir / CONFIG} is damaged: not compared ({first_line})")
        return {}
    return dict(_leaves(tree, "")) if isinstance(tree, dict) else {}


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Sequence[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", "null" if value is None else str(value)))
    return found


def _count(value: Any) -> int | None:
    """The value as a count; None for anything else."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15
    return int(value) if is_one else None
