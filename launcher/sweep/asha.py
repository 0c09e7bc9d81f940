"""Which jobs are stopped early: asynchronous successive halving, on the compared metric after evaluations.

Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020), as Optuna has it: a job that
reaches a rung continues if it is among the best third of those that have reached it. Owns the reading of
evaluations; it keeps no file. A sweep that continues reads the evaluations of its jobs again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.run_dir.records import METRICS
from launcher.sweep.search import imported_optuna
from launcher.sweep.state import OVER, JobState, SweepJob
from launcher.telemetry.event_log import TailReader
from launcher.telemetry.events import EvalEvent, StartEvent, event_of

REDUCTION = 3  # one job in so many passes a rung, and rungs lie so many times as far apart


@dataclass
class Evaluations:
    """The metric by which a job is compared, after each of its evaluations, read as they are written."""

    directory: Path
    name: str | None = None  # None before the first evaluation
    higher_is_better: bool = False
    values: dict[int, float] = field(default_factory=dict)  # by step: a resumed job repeats some of them
    _compare_by: str | None = None  # of the recipe
    _reader: TailReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = TailReader(self.directory / METRICS)

    def poll(self) -> None:
        """Read new lines; all again where the job has resumed. Raises OSError."""
        for record in self._reader.poll()[0]:
            if record["event"] in (StartEvent.kind, EvalEvent.kind):
                self._add(event_of(record))

    def _add(self, event: object) -> None:
        if isinstance(event, StartEvent):
            self._compare_by = event.monitor
        elif isinstance(event, EvalEvent):
            usual = "accuracy" if event.higher_is_better.get("accuracy") else "val_loss"
            self.name = name = self._compare_by or usual
            of_set, slash, rest = name.partition("/")
            if slash and event.set is not None:
                if of_set != event.set:
                    return
                name = rest
            value = event.val_loss if name == "val_loss" else event.metrics.get(name)
            self.higher_is_better = bool(event.higher_is_better.get(name))
            self.values.setdefault(event.step, math.nan if value is None else value)  # the first set counts

    @property
    def costs(self) -> list[float]:
        """The cost of each evaluation, where lower is better; a value that is not a number is the worst."""
        in_order = (value for _, value in sorted(self.values.items()))
        return [math.inf if math.isnan(v) else -v if self.higher_is_better else v for v in in_order]


class Pruner:
    """Follows the evaluations of the jobs in a sweep's folder, and says which jobs to stop."""

    def __init__(self, directory: Path, grace_period: int, jobs: Iterable[SweepJob]) -> None:
        """`jobs` are those that sweep.json has: verdicts begin with what those that are over have shown.

        Raises ConfigError without Optuna.
        """
        self._optuna = imported_optuna("sweep.prune=asha", "Without it all jobs run to their end.")
        self._directory, self._grace_period = directory, grace_period
        self._evaluations: dict[int, Evaluations] = {}
        self._studies: dict[str | None, Any] = {}  # by metric: only jobs of one metric are compared
        self._trials: dict[int, Any] = {}  # by number of the job
        for job in jobs:
            if job.state in OVER:
                self._reached(job)

    def to_prune(self, running: Iterable[SweepJob]) -> list[SweepJob]:
        """The jobs that are to end, each once, with the metric of the evaluation that decided."""
        return [job for job in running if job.state == JobState.RUNNING and self._is_out(job)]

    def _is_out(self, job: SweepJob) -> bool:
        found, rung = self._reached(job)
        if rung is None:
            return False
        job.metric = sorted(found.values.items())[rung - 1][1]
        job.metric_name, job.higher_is_better = found.name, found.higher_is_better
        job.error = f"after evaluation {rung} it is not among the best third of the jobs that came as far"
        return True

    def _reached(self, job: SweepJob) -> tuple[Evaluations, int | None]:
        """The job's evaluations so far, and the number of the one by which it has just fallen behind."""
        found = self._evaluations.setdefault(job.number, Evaluations(self._directory / job.name))
        with suppress(OSError):  # a job is not pruned for a file that cannot be read
            found.poll()
        costs = found.costs
        if not costs:
            return found, None
        if job.number not in self._trials:
            self._trials[job.number] = self._study_of(found.name).ask()
        trial = self._trials[job.number]
        known = len(trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        for number, cost in enumerate(costs[known:], known + 1):
            trial.report(cost, number)
            if trial.should_prune():
                return found, number
        return found, None

    def _study_of(self, metric: str | None) -> Any:
        """A study in memory: a sweep that continues reports the evaluations of its jobs again."""
        if metric not in self._studies:
            rule = self._optuna.pruners.SuccessiveHalvingPruner(self._grace_period, REDUCTION)
            self._studies[metric] = self._optuna.create_study(direction="minimize", pruner=rule)
        return self._studies[metric]
