"""The training loop: a table of contents of a run.

Owns the order of training, logging, evaluation and saving. Every line it runs is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from launcher.config.schema import TrainConfig
from launcher.data.loader import Batch, DeviceBatches
from launcher.engine import Stepper, StepResult
from launcher.recipe import Loss, loss_of
from launcher.training.checkpointing import Measured, Saving
from launcher.training.monitor import Moment, Watch
from launcher.training.replica_check import check_replicas


@dataclass(frozen=True)
class Course:
    """How long a run is and when it pauses to evaluate; steps count updates, skipped ones included."""

    steps_per_epoch: int
    total_steps: int
    eval_every_epochs: int
    check_every_steps: int | None = None

    @classmethod
    def of(cls, steps_per_epoch: int, train: TrainConfig, check_every_steps: int | None = None) -> Course:
        total = steps_per_epoch * train.epochs
        steps = min(total, train.max_steps or total)
        return cls(steps_per_epoch, steps, train.eval_every_epochs, check_every_steps)

    def checks_after(self, step: int) -> bool:
        """Whether the ranks' replicas are compared after this step."""
        return self.check_every_steps is not None and step % self.check_every_steps == 0

    def moment_after(self, step: int) -> Moment:
        """Where the run stands once it has done `step` steps, at least one."""
        return Moment((step - 1) // self.steps_per_epoch, step)

    def evaluates_after(self, step: int) -> bool:
        """After every `eval_every_epochs` whole epochs, and at the end of the run."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return step == self.total_steps or (rest == 0 and epochs % self.eval_every_epochs == 0)


@dataclass(frozen=True)
class Start:
    """Where a run begins: after so many steps, the last of which may still owe its evaluation."""

    step: int = 0
    owes_evaluation: bool = False


def train(
    stepper: Stepper,
    network: nn.Module,
    loss: Callable[[nn.Module, Batch], Loss],
    batches: DeviceBatches,
    course: Course,
    start: Start,
    watch: Watch,
    saving: Saving,
    first_step_done: Callable[[], None],
    evaluate: Callable[[Moment], Measured | None],
) -> None:
    """Train from `start` to the last step. A collective: all ranks run the same course.

    `evaluate` returns None, on all ranks, where it was broken off because one was asked to stop.
    Raises PreemptedError, on all ranks after the same step, where any of them was asked to stop.
    """
    measured: Measured | None
    network.train()
    if start.owes_evaluation:
        moment = course.moment_after(start.step)
        measured = evaluate(moment)
        if measured is None:
            saving.hear_of_stop()
        saving.after(moment, measured, last=start.step == course.total_steps)
    watch.resume()
    for step in range(start.step, course.total_steps):
        epoch, step_of_epoch = divmod(step, course.steps_per_epoch)
        moment = Moment(epoch, step + 1)

        saving.vote(moment)
        stepper.clock.restart()
        micro_batches = batches.step(epoch, step_of_epoch)
        stepper.clock.mark("data")
        result = train_on(stepper, network, loss, micro_batches)
        watch.see(moment, result)

        if step == start.step:
            watch.catch_up()
            first_step_done()
        if course.checks_after(moment.step):
            check_replicas(stepper)
        measured = None
        if course.evaluates_after(moment.step) and not saving.stops():
            watch.catch_up()
            measured = evaluate(moment)
            if measured is None:
                saving.hear_of_stop()
            watch.resume()
        saving.after(moment, measured, last=moment.step == course.total_steps)


def train_on(
    stepper: Stepper,
    network: nn.Module,
    loss: Callable[[nn.Module, Batch], Loss],
    micro_batches: list[Batch],
) -> StepResult:
    """One update from this rank's micro-batches, which may be none."""
    for batch in micro_batches:
        with stepper.forward():
            of_batch = loss_of(loss, network, batch)
        stepper.backward(of_batch.sum, of_batch.count)
    return stepper.step()
