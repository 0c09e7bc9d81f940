"""When a run is saved, and when it stops because it was asked to.

Owns the votes by which the ranks agree on both, the comparison of the replicas before each checkpoint, and
what is told of one. Every method is called by all ranks at the same point of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from launcher.checkpoint import Due, Metric, Report, Staged, Writer
from launcher.distributed.collectives import exchange_texts
from launcher.distributed.heartbeat import Heartbeat
from launcher.distributed.process_group import WorkerEnv
from launcher.engine import Stepper
from launcher.engine.state import counters_of
from launcher.errors import PreemptedError, StorageError
from launcher.telemetry import Telemetry
from launcher.training.monitor import Moment, Watch
from launcher.training.replica_check import check_replicas
from launcher.training.signals import Requests


class Question(IntEnum):
    """What the ranks vote on in every step. One vote is enough."""

    STOP = 0
    SAVE = 1
    GIVE_UP = 2  # a checkpoint could not be written, and the run is not to go on without


@dataclass(frozen=True)
class Measured:
    """What an evaluation found, and whether it is better than all earlier ones."""

    metric: Metric
    is_best: bool
    loss: float  # mean over the held-out set


@dataclass
class Standing:
    """What a run knows of its past besides the training state."""

    best: Metric | None = None  # of all evaluations so far
    seconds: float = 0.0  # of training

    def measure(self, name: str, value: float, lower_is_better: bool, loss: float) -> Measured:
        """Record an evaluation. A value that is not a number is never the best."""
        metric = Metric(name, value, lower_is_better)
        cost = value if lower_is_better else -value
        before = math.inf if self.best is None else self.best.value * (1 if lower_is_better else -1)
        is_best = cost < before
        if is_best:
            self.best = metric
        return Measured(metric, is_best, loss)

    def as_values(self) -> dict[str, Any]:
        best = None if self.best is None else [self.best.name, self.best.value, self.best.lower_is_better]
        return {"best": best, "seconds": self.seconds}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Standing:
        """The inverse of `as_values`; what an older checkpoint lacks is as at the start."""
        best = values.get("best")
        return cls(None if best is None else Metric(*best), float(values.get("seconds", 0.0)))


@dataclass
class Saving:
    """Decides after each step whether the run is saved and whether it ends there.

    `take` copies the run's state at a moment, with what was measured there: a collective whose result is
    None except on rank 0. `stops_on_error` ends the run where a checkpoint cannot be written.
    """

    stepper: Stepper
    env: WorkerEnv
    watch: Watch
    writer: Writer
    due: Due
    requests: Requests
    telemetry: Telemetry
    heartbeat: Heartbeat
    take: Callable[[Moment, Metric | None], Staged | None]
    stops_on_error: bool
    _heard: set[Question] = field(default_factory=set)  # the answers to votes, the same on all ranks
    _failure: str = ""  # of the latest checkpoint, on the leader

    def vote(self, moment: Moment) -> None:
        """A step begins: say with its counts what this rank wants."""
        self.heartbeat.beat("data", moment.step)
        self._tell(self.writer.poll())
        if self.requests.stop is not None:
            self.stepper.vote(Question.STOP)
        by_clock = self.env.is_leader and self.due.by_clock()
        if self.requests.take_save() or by_clock:
            self.due.done()  # asked for: it is saved a step later
            self.stepper.vote(Question.SAVE)
        if self._failure and self.stops_on_error:
            self.stepper.vote(Question.GIVE_UP)

    def stops(self) -> bool:
        """Whether some rank was asked to stop, as far as the ranks have told each other."""
        votes = self.watch.take_votes()
        self._heard |= {question for question in Question if votes[question]}
        return Question.STOP in self._heard

    def hear_of_stop(self) -> None:
        """The ranks have agreed outside of a step that one of them was asked to stop."""
        self._heard.add(Question.STOP)

    def after(self, moment: Moment, measured: Measured | None, last: bool) -> None:
        """Save and stop as voted and as due, on all ranks alike.

        `measured` belongs to this very step; None where it was not evaluated, or not to the end. Raises
        PreemptedError for a run that was asked to stop, StorageError for one that cannot be saved, and
        DivergedError for one that ends with nothing to save.
        """
        done = last and measured is not None
        stops = self.stops() and not done
        heard, self._heard = self._heard, set()
        if Question.GIVE_UP in heard and (failure := self._of_leader(self._failure)):
            raise StorageError(failure)  # unless a later one could be written after all
        if done and measured is not None:
            self.watch.refuse_fruitless_end(moment, counters_of(self.stepper.scale), measured.loss)
        is_best = measured is not None and measured.is_best
        if stops or done or is_best or Question.SAVE in heard or self.due.after_step(moment.step):
            self._save(moment, None if measured is None else measured.metric)
        if stops or done:
            self._tell(self.writer.wait())
            if failure := self._of_leader(self._failure):
                raise StorageError(
                    f"the run is not saved: {failure} With room again the same command with "
                    f"run.dir={self.writer.directory.parent} resumes from the newest checkpoint."
                )
        if stops:
            self.watch.catch_up()
            run_dir = self.writer.directory.parent
            raise PreemptedError(
                f"after step {moment.step}, as asked, and saved. To go on give the same command with "
                f"run.dir={run_dir}"
            )

    def _save(self, moment: Moment, metric: Metric | None) -> None:
        self.watch.settle()  # what has diverged is not saved
        self.heartbeat.beat("consistency check")
        check_replicas(self.stepper)
        self.heartbeat.beat("checkpoint")
        self._tell(self.writer.publish(lambda: self.take(moment, metric)))
        self.due.done()
        self.watch.resume()

    def _of_leader(self, text: str) -> str:
        """What the leader, which alone writes files, has to say to all. A collective."""
        return exchange_texts(self.env, text)[0]

    def _tell(self, report: Report | None) -> None:
        if report is None:
            return
        if report.path is not None:
            self._failure = ""
            size, seconds = report.size_bytes, report.seconds
            self.telemetry.emit(
                "checkpoint", report.step, path=str(report.path), seconds=seconds, size_bytes=size
            )
        if report.error is not None:
            self._failure = self._failure if report.path else str(report.error)
            self.telemetry.warn(str(report.error))
