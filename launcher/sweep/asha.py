"""Which jobs are stopped early: asynchronous successive halving, on the compared metric after evaluations.

Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020), in its stopping form: a job
that reaches a rung continues if it is among the best third of those that have reached it. Owns the rule and
the reading of evaluations; it keeps no file. A sweep that continues reads the evaluations of its jobs again.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher.run_dir.atomic import open_plain
from launcher.run_dir.records import METRICS
from launcher.sweep.record import OVER, State, SweepJob
from launcher.telemetry.event_log import LAST_BYTES, parsed
from launcher.telemetry.events import EvalEvent, StartEvent, event_of

REDUCTION = 3  # one job in so many passes a rung, and rungs lie so many times as far apart; 3 and 4 are usual
BEGINNINGS = tuple(f'{{"event": "{kind.kind}"'.encode() for kind in (StartEvent, EvalEvent))


@dataclass
class Evaluations:
    """The metric by which a job is compared, after each of its evaluations, read as they are written."""

    directory: Path
    name: str | None = None  # None before the first evaluation
    higher_is_better: bool = False
    values: dict[int, float] = field(default_factory=dict)  # by step: a resumed job repeats some of them
    _compare_by: str | None = None  # of the recipe
    _offset: int = 0  # bytes read of metrics.jsonl
    _last: bytes = b""  # what stands before them

    def poll(self) -> None:
        """Read whole new lines; all again where the job has resumed. Raises OSError, not without a file."""
        path = self.directory / METRICS
        with suppress(FileNotFoundError), open(open_plain(path, os.O_RDONLY), "rb") as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._offset = file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset, self._last = self._offset + len(line), line[-LAST_BYTES:]
                if line.startswith(BEGINNINGS) and (record := parsed(line)) is not None:
                    self._add(event_of(record))

    def _add(self, event: object) -> None:
        if isinstance(event, StartEvent):
            self._compare_by = event.compare_by
        elif isinstance(event, EvalEvent):
            usual = "accuracy" if event.higher_is_better.get("accuracy") else "loss"
            self.name = name = self._compare_by or usual
            of_set, slash, rest = name.partition("/")
            if slash and event.set is not None:
                if of_set != event.set:
                    return
                name = rest
            value = event.loss if name == "loss" else event.metrics.get(name)
            self.higher_is_better = bool(event.higher_is_better.get(name))
            self.values.setdefault(event.step, math.nan if value is None else value)  # the first set counts

    @property
    def costs(self) -> list[float]:
        """The cost of each evaluation, where lower is better; a value that is not a number is the worst."""
        in_order = (value for _, value in sorted(self.values.items()))
        return [math.inf if math.isnan(v) else -v if self.higher_is_better else v for v in in_order]


class Asha:
    """The verdicts on the jobs of a sweep. Each job may make `patience` evaluations before the first."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        # Costs by job, for each metric and number of evaluations.
        self._rungs: dict[tuple[str | None, int], dict[int, float]] = defaultdict(dict)

    def reached(self, job: int, costs: list[float], metric: str | None = None) -> int | None:
        """Record a job's evaluations so far; the rung that it has just reached and not passed, or None.

        Jobs are compared with those of the same metric. A rung is a number of evaluations. Each is decided
        once, when it is reached, by what is known then.
        """
        rung = self._patience
        while rung <= len(costs):
            at_rung = self._rungs[metric, rung]
            if job not in at_rung:
                at_rung[job] = cost = costs[rung - 1]
                better = sum(other < cost for other in at_rung.values())
                # Fewer than REDUCTION jobs have no best third. A job cannot wait for others, so it continues.
                if len(at_rung) >= REDUCTION and better >= len(at_rung) // REDUCTION:
                    return rung
            rung *= REDUCTION
        return None


class Pruner:
    """Follows the evaluations of the jobs in a sweep's folder, and says which jobs to stop."""

    def __init__(self, directory: Path, patience: int, jobs: Iterable[SweepJob]) -> None:
        """`jobs` are those that sweep.json has: verdicts begin with what those that are over have shown."""
        self._directory, self._asha = directory, Asha(patience)
        self._evaluations: dict[int, Evaluations] = {}
        for job in jobs:
            if job.state in OVER:
                self._reached(job)

    def to_prune(self, running: Iterable[SweepJob]) -> list[SweepJob]:
        """The jobs that are to end, each once, with the metric of the evaluation that decided."""
        return [job for job in running if job.state == State.RUNNING and self._is_out(job)]

    def _is_out(self, job: SweepJob) -> bool:
        found, rung = self._reached(job)
        if rung is None:
            return False
        job.metric = sorted(found.values.items())[rung - 1][1]
        job.metric_name, job.higher_is_better = found.name, found.higher_is_better
        job.error = f"after evaluation {rung} it is not among the best third of the jobs that came as far"
        return True

    def _reached(self, job: SweepJob) -> tuple[Evaluations, int | None]:
        """What the job has evaluated so far, and the rung that it has just reached and not passed."""
        found = self._evaluations.setdefault(job.number, Evaluations(self._directory / job.name))
        with suppress(OSError):  # a job is not pruned for a file that cannot be read
            found.poll()
        return found, self._asha.reached(job.number, found.costs, found.name)
