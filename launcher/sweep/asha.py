"""Which jobs are stopped early: asynchronous successive halving, on the compared metric after evaluations.

Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020), as Optuna has it: a job that
reaches a rung continues if it is among the best third of those that have reached it. Keeps no file: a sweep
that continues reads the evaluations of its jobs again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.report.event_history import EventHistory, HistoryReader
from launcher.sweep.search import imported_optuna
from launcher.sweep.state import OVER, JobState, SweepJob
from launcher.telemetry.events import EvalEvent, StartEvent

REDUCTION = 3  # one job in so many passes a rung, and rungs lie so many times as far apart


def compared(history: EventHistory) -> tuple[str, bool, Sequence[float]]:
    """By what a job is compared, whether more of it is better, and its value in each evaluation.

    A value that is not finite is the worst that there is.
    """
    start, last = history.last(StartEvent), history.last(EvalEvent)
    usual = "accuracy" if history.evaluation("accuracy") else "val_loss"
    name = (start.monitor if start else None) or usual
    if last is None:
        return name, False, ()
    higher_is_better = last.higher_is_better.get(name.rpartition("/")[2], False)
    worst = -math.inf if higher_is_better else math.inf
    values = [_value(event, name, history) for event in history.all(EvalEvent)]
    compared_by = [value if math.isfinite(value) else worst for value in values if value is not None]
    return name, higher_is_better, compared_by


def _value(event: EvalEvent, name: str, history: EventHistory) -> float | None:
    """The metric in one evaluation, by its name in the first set or by SET/METRIC; None if it has none."""
    key = name if name in history.evaluations or not history.sets else f"{history.sets[0]}/{name}"
    prefix = "" if event.set is None else f"{event.set}/"
    metrics = {"val_loss": event.val_loss, **event.metrics}
    return next((value for each, value in metrics.items() if prefix + each == key), None)


class Pruner:
    """Follows the evaluations of the jobs in a sweep's folder, and says which jobs to stop."""

    def __init__(self, directory: Path, grace_period: int, jobs: Iterable[SweepJob]) -> None:
        """`jobs` are those that sweep.json has: verdicts begin with what those that are over have shown.

        Raises ConfigError without Optuna.
        """
        self._optuna = imported_optuna()
        self._directory, self._grace_period = directory, grace_period
        self._readers: dict[int, HistoryReader] = {}  # by number of the job
        self._studies: dict[str, Any] = {}  # by metric: only jobs of one metric are compared
        self._trials: dict[int, Any] = {}  # by number of the job
        for job in jobs:
            if job.state in OVER:
                self._reached(job)

    def to_prune(self, running: Iterable[SweepJob]) -> list[SweepJob]:
        """The jobs that are to end, each once, with the metric of the evaluation that decided."""
        return [job for job in running if job.state == JobState.RUNNING and self._is_out(job)]

    def _is_out(self, job: SweepJob) -> bool:
        rung = self._reached(job)
        if rung is None:
            return False
        job.metric_name, job.higher_is_better, values = compared(self._readers[job.number].history)
        job.metric = values[rung - 1]
        job.error = f"after evaluation {rung} it is not among the best third of the jobs that came as far"
        return True

    def _reached(self, job: SweepJob) -> int | None:
        """The number of the evaluation by which the job has just fallen behind, if it has."""
        reader = self._readers.setdefault(job.number, HistoryReader(self._directory / job.name))
        with suppress(OSError):  # a job is not pruned for a file that cannot be read
            reader.poll()
        metric, higher_is_better, values = compared(reader.history)
        if not values:
            return None
        if job.number not in self._trials:
            self._trials[job.number] = self._study_of(metric, higher_is_better).ask()
        trial = self._trials[job.number]
        known = len(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        for number, value in enumerate(values[known:], known + 1):
            trial.report(value, number)
            if trial.should_prune():
                return number
        return None

    def _study_of(self, metric: str, higher_is_better: bool) -> Any:
        """A study in memory: a sweep that continues reports the evaluations of its jobs again."""
        if metric not in self._studies:
            rule = self._optuna.pruners.SuccessiveHalvingPruner(self._grace_period, REDUCTION)
            self._studies[metric] = self._optuna.create_study(
                direction="maximize" if higher_is_better else "minimize", pruner=rule
            )
        return self._studies[metric]
