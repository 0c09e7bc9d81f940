"""How long a run is and where it stands: the values that its parts exchange. Saves and reports nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from launcher.checkpoint.run_state import MonitoredMetric
from launcher.config.schema import TrainConfig
from launcher.data.batch_plan import BatchPlan
from launcher.engine import StepReport
from launcher.evaluation.evaluate import Evaluation


class StepIndex(NamedTuple):
    """One step of a run. `global_step` counts from 1 and includes skipped steps; the others count from 0."""

    epoch: int
    batch_idx: int
    global_step: int


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts: after `step` steps, the last of which may not have been evaluated yet."""

    step: int = 0
    evaluation_pending: bool = False
    from_checkpoint: bool = False
    stream: Sequence[str] = ()  # by rank: where it stood in a stream


@dataclass(frozen=True)
class TrainLength:
    """How long a run is, and when it evaluates; steps count updates, skipped ones included."""

    steps_per_epoch: int
    total_steps: int
    eval_every_epochs: int
    eval_every_steps: int | None = None

    @classmethod
    def of(cls, steps_per_epoch: int, train: TrainConfig) -> TrainLength:
        total = train.total_steps(steps_per_epoch)
        return cls(steps_per_epoch, total, train.eval_every_epochs, train.eval_every_steps)

    def index_of(self, step: int) -> StepIndex:
        """The index of step `step`, at least 1."""
        return StepIndex(*divmod(step - 1, self.steps_per_epoch), step)

    def is_last_step(self, step: int) -> bool:
        return step == self.total_steps

    def should_evaluate(self, step: int) -> bool:
        """True after every `eval_every_epochs` whole epochs, every `eval_every_steps` steps, and the end."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        by_epochs = rest == 0 and epochs % self.eval_every_epochs == 0
        by_steps = self.eval_every_steps is not None and step % self.eval_every_steps == 0
        return by_epochs or by_steps or self.is_last_step(step)

    def next_evaluation(self, step: int) -> int:
        """The first step after `step` that is evaluated."""
        of_epochs = self.eval_every_epochs * self.steps_per_epoch
        intervals = of_epochs, self.eval_every_steps or of_epochs
        return min(self.total_steps, *((step // every + 1) * every for every in intervals))


@dataclass(frozen=True)
class EvalOutcome:
    """Result of an evaluation, and whether it is better than all earlier ones.

    At the end of a run without evaluations it has no metric. `loss` is the mean over the first held-out set.
    """

    metric: MonitoredMetric | None = None
    is_best: bool = False
    loss: float = 0.0
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)  # by set
    is_last: bool = False  # the run ends here


class StepFlag(IntEnum):
    """What a rank may vote in a step: an index into StepReport.votes, the sums over all ranks."""

    STOP = 0  # this and the next two are set if any rank sets them
    SAVE = 1
    ABORT = 2  # a checkpoint could not be written, so the run must end
    BAD_SAMPLES = 3  # how many samples were left out
    STREAM_END = 4  # nothing left in this pass over a stream; all ranks must set it
    MISSING_SAMPLES = 5  # how many samples ranks lack of their shares, where a stream ends


def samples_of(plan: BatchPlan, index: StepIndex, report: StepReport) -> int:
    """How many samples of the data set the step trained on, over all ranks.

    Not `report.count`, which a loss may give in tokens, pixels or weights.
    """
    left_out = report.votes[StepFlag.BAD_SAMPLES] + report.votes[StepFlag.MISSING_SAMPLES]
    return plan.samples_of(index.batch_idx) - int(left_out)
