"""Progress of a run: the values that its parts exchange.

Owns the count of steps and epochs, and the best evaluation so far. Saves and reports nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from launcher.checkpoint import Metric
from launcher.config.schema import TrainConfig
from launcher.engine import StepReport


class Position(NamedTuple):
    """One step of a run. `step` counts from 1 and includes skipped steps; the others count from 0."""

    epoch: int
    step_of_epoch: int
    step: int


@dataclass(frozen=True)
class Start:
    """Where a run starts: after `step` steps, the last of which may not have been evaluated yet."""

    step: int = 0
    owes_evaluation: bool = False


@dataclass(frozen=True)
class Course:
    """How long a run is, and when it evaluates and checks; steps count updates, skipped ones included."""

    steps_per_epoch: int
    total_steps: int
    eval_every_epochs: int
    check_every_steps: int | None = None
    eval_every_steps: int | None = None

    @classmethod
    def of(cls, steps_per_epoch: int, train: TrainConfig, check_every_steps: int | None = None) -> Course:
        total = train.total_steps(steps_per_epoch)
        return cls(steps_per_epoch, total, train.eval_every_epochs, check_every_steps, train.eval_every_steps)

    def position_of(self, step: int) -> Position:
        """The position of step `step`, at least 1."""
        return Position(*divmod(step - 1, self.steps_per_epoch), step)

    def ends_with(self, step: int) -> bool:
        return step == self.total_steps

    def checks_after(self, step: int) -> bool:
        """Whether the ranks' replicas are compared after this step."""
        return self.check_every_steps is not None and step % self.check_every_steps == 0

    def evaluates_after(self, step: int) -> bool:
        """After every `eval_every_epochs` whole epochs, every `eval_every_steps` steps, and at the end."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        by_epochs = rest == 0 and epochs % self.eval_every_epochs == 0
        by_steps = self.eval_every_steps is not None and step % self.eval_every_steps == 0
        return by_epochs or by_steps or self.ends_with(step)


HIGHER_IS_BETTER = {"loss": False, "train_loss": False, "train_accuracy": True}  # in every evaluation


@dataclass
class SinceEvaluation:
    """The training samples (or tokens) since the last evaluation, over all ranks, as they were trained on."""

    loss_sum: float = 0.0
    loss_count: float = 0.0
    right: int = 0  # of a classifier
    answered: int = 0

    def metrics(self) -> dict[str, float]:
        """`train_loss` and `train_accuracy`, as far as there is something to divide by."""
        loss = {"train_loss": self.loss_sum / self.loss_count} if self.loss_count else {}
        return loss | ({"train_accuracy": self.right / self.answered} if self.answered else {})


@dataclass
class Totals:
    """What the whole run has done so far, in training only (evaluation excluded)."""

    samples: float = 0.0
    seconds: float = 0.0
    wire_bytes_per_step: int = 0
    since_evaluation: SinceEvaluation = field(default_factory=SinceEvaluation)

    def add(self, report: StepReport, seconds: float) -> None:
        """A step."""
        count, since = report.count, self.since_evaluation
        self.samples += count
        self.seconds += seconds
        self.wire_bytes_per_step = report.wire_bytes
        if count and not report.bad_losses:
            since.loss_sum += report.loss * count
            since.loss_count += count


@dataclass(frozen=True)
class Measured:
    """Result of an evaluation, and whether it is better than all earlier ones.

    At the end of a run without evaluations it has no metric.
    """

    metric: Metric | None
    is_best: bool
    loss: float  # mean over the held-out set
    stops: str = ""  # why the run ends here, before its last step


@dataclass(frozen=True)
class MicroBatch:
    """The micro-batch per rank that a run uses in place of `wish`, the value of data.micro_batch."""

    wish: str | int | None
    size: int


@dataclass(frozen=True)
class Watched:
    """What early stopping remembers: the best value, and how many evaluations were no better since then."""

    best: Metric
    best_step: int
    waited: int
    step: int  # of the latest evaluation


@dataclass
class Standing:
    """History of a run besides the training state."""

    best: Metric | None = None  # of all evaluations so far
    seconds: float = 0.0  # of training
    since_evaluation: SinceEvaluation = field(default_factory=SinceEvaluation)
    rescued: list[list[str]] = field(default_factory=list)  # by rescue: patterns of modules now in fp32
    started_from: tuple[str, str] | None = None  # model.weights, and the SHA-256 that the file had
    watched: Watched | None = None  # None before the first evaluation under early stopping
    micro_batch: MicroBatch | None = None  # None: that of the config

    def measure(self, metric: Metric, loss: float) -> Measured:
        """Record an evaluation. A value that is not a number is never the best."""
        best = self.best
        before = best.cost if best is not None and best.is_like(metric) else math.inf
        is_best = metric.cost < before
        if is_best:
            self.best = metric
        return Measured(metric, is_best, loss)

    def as_values(self) -> dict[str, Any]:
        best = None if self.best is None else [self.best.name, self.best.value, self.best.lower_is_better]
        since = asdict(self.since_evaluation)
        return {
            "best": best,
            "seconds": self.seconds,
            "since_evaluation": since,
            "rescued": self.rescued,
            "started_from": self.started_from,
            "watched": None if self.watched is None else asdict(self.watched),
            "micro_batch": None if self.micro_batch is None else asdict(self.micro_batch),
        }

    @classmethod
    def of(cls, values: dict[str, Any]) -> Standing:
        """The inverse of `as_values`; values missing in an older checkpoint are as at the start."""
        best, started_from = values.get("best"), values.get("started_from")
        watched, micro_batch = values.get("watched"), values.get("micro_batch")
        return cls(
            best=None if best is None else Metric(*best),
            seconds=float(values.get("seconds", 0.0)),
            since_evaluation=SinceEvaluation(**values.get("since_evaluation", {})),
            rescued=[list(patterns) for patterns in values.get("rescued", ())],
            started_from=None if started_from is None else tuple(started_from),
            watched=None if watched is None else Watched(**{**watched, "best": Metric(**watched["best"])}),
            micro_batch=None if micro_batch is None else MicroBatch(**micro_batch),
        )
