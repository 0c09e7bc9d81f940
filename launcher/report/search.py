"""A search as `sweep.json` shows it: the metric of each trial, and the best so far.

Reads the file alone, never Optuna's study.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.report.charts.chart import Chart, Line, axis_of, steps_axis
from launcher.report.reading import sweep_of
from launcher.report.run_record import RunRecord
from launcher.telemetry.formatting import SHARES, metric_title

SEARCHES = ("random", "tpe")  # values of sweep.name
COLORS = {"done": 0, "pruned": 4, "failed": 1}  # of a trial by its state; the metric of others may change
BEST_COLOR = 2


@dataclass(frozen=True)
class Trial:
    """A job that has ended. Without a finite metric it counts as failed."""

    number: int
    state: str
    metric: float  # of a pruned one, that of the evaluation that decided; NaN if it failed


@dataclass(frozen=True)
class Search:
    """The trials in the order in which they were drawn."""

    trials: Sequence[Trial]
    metric_name: str
    higher_is_better: bool

    @classmethod
    def read(cls, sweep_dir: Path, runs: Sequence[RunRecord]) -> Search | None:
        """The search whose jobs these runs are; None for a grid, or where sweep.json cannot be read."""
        if not any(run.config.get("sweep.name") in SEARCHES for run in runs):
            return None
        try:
            jobs = [job for job in sweep_of(sweep_dir)["jobs"] if job.get("state") in COLORS]
            trials = [_trial(job) for job in jobs]
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        named: dict[str, Any] = next((job for job in jobs if job.get("metric_name")), {})
        return cls(trials, named.get("metric_name", "metric"), bool(named.get("higher_is_better")))

    def chart(self) -> Chart:
        """The metric of each trial in the order in which they were drawn, and the best so far."""
        in_percent = self.metric_name.endswith(SHARES)
        lines, last = [], max((trial.number for trial in self.trials), default=0)
        for state in ("done", "pruned"):
            trials = [trial for trial in self.trials if trial.state == state]
            x = np.array([trial.number for trial in trials], np.float64)
            y = np.array([trial.metric for trial in trials]) * (100 if in_percent else 1)
            if state == "done" and trials:
                best = (np.maximum if self.higher_is_better else np.minimum).accumulate(y)
                reached = np.append(x, last), np.append(best, best[-1])
                lines.append(Line("best so far", BEST_COLOR, *reached, "steps"))
            lines.append(Line(state, COLORS[state], x, y, "dots"))
        marks = [(float(trial.number), "failed") for trial in self.trials if trial.state == "failed"]
        note = "Dashed lines: trials that failed, or ended without a finite metric." if marks else ""
        title, unit = metric_title(self.metric_name), "%" if in_percent else ""
        y_axis = axis_of(np.concatenate([line.y for line in lines]), 1 if in_percent else None)
        title = f"{title[:1].upper()}{title[1:]} of each trial"
        return Chart(title, unit, lines, steps_axis(last + 0.5, -0.5), y_axis, "trial", marks, note)


def _trial(job: Mapping[str, Any]) -> Trial:
    value = math.nan if job["state"] == "failed" else float(job.get("metric", math.nan))
    state = job["state"] if math.isfinite(value) else "failed"
    return Trial(int(job["number"]), state, value if math.isfinite(value) else math.nan)
