"""The training loop: a table of contents of a run.

Owns the order of training, logging, evaluation and saving. Every line it runs is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from launcher.data.sources import Batches
from launcher.data.tensors import Batch
from launcher.engine import Stepper, StepResult, WeightAverage
from launcher.engine.diagnostics.step_timer import DATA
from launcher.errors import DataError
from launcher.recipe.contract import Loss, loss_of
from launcher.training.answers import Answers
from launcher.training.failures.model_mistakes import in_place_mistake
from launcher.training.parts.checkpoints import Checkpoints
from launcher.training.parts.evaluation import Evaluator
from launcher.training.parts.log import Monitor
from launcher.training.parts.relief import DroppedStepError, Relief
from launcher.training.parts.replica_check import Replicas
from launcher.training.progress import Course, Position, Start
from launcher.training.run import Question, Voter


class Learner(Protocol):
    """What trains a network, one step at a time."""

    @property
    def network(self) -> nn.Module: ...

    def train_on(self, position: Position) -> StepResult: ...


@dataclass(frozen=True)
class Task:
    """What is trained: a network, its loss and this rank's batches."""

    stepper: Stepper
    network: nn.Module
    loss: Callable[[nn.Module, Batch], Loss]
    batches: Batches
    answers: Answers
    relief: Relief

    def train_on(self, position: Position) -> StepResult:
        """One update from this rank's micro-batches, which may be none."""
        if self.relief.dropping:
            return self.stepper.abandon()
        self.relief.begin(position)
        try:
            ends = self._learn(position)
            result = self.stepper.step()
        except Exception as error:
            if not (self.stepper.can_abandon and self.relief.accepts(error, position)):
                raise
            return self.stepper.abandon()
        if not ends:
            return result
        report = result.read()  # without waiting for the next step: all ranks with nothing left do so
        if report.votes[Question.STREAM_END] == self.batches.plan.world_size:
            if not report.count:
                raise DataError("the training stream is empty: a whole pass over it gave no samples.")
            self.batches.begin_again()
        return result

    def _learn(self, position: Position) -> bool:
        """All passes of a step. Whether this rank has nothing left of the stream."""
        self.stepper.clock.restart()
        micro_batches = self.batches.step(position.epoch, position.step_of_epoch)
        self.stepper.clock.mark(DATA)
        if bad := self.batches.take_bad():
            self.stepper.vote(Question.BAD_SAMPLES, bad)
        if ends := self.batches.at_end():
            self.stepper.vote(Question.STREAM_END)
        for batch in micro_batches:
            self.answers.count(self.learn_from(batch), batch)
        return ends

    def learn_from(self, batch: Batch) -> Loss:
        """Forward and backward pass of a micro-batch."""
        with self.stepper.forward():
            of_batch = loss_of(self.loss, self.network, batch)
        try:
            self.stepper.backward(of_batch.sum, of_batch.count)
        except RuntimeError as error:
            if (mistake := in_place_mistake(error, self.network, self.loss)) is None:
                raise
            raise mistake from error
        return of_batch


@dataclass(frozen=True)
class Averaged:
    """A learner whose steps a moving average of the weights follows."""

    learner: Learner
    average: WeightAverage

    @property
    def network(self) -> nn.Module:
        return self.learner.network

    def train_on(self, position: Position) -> StepResult:
        """A step, and its part in the average."""
        result = self.learner.train_on(position)
        self.average.update(position.step)
        return result


def train(
    course: Course,
    start: Start,
    task: Learner,
    checkpoints: Checkpoints,
    monitor: Monitor,
    replicas: Replicas,
    evaluator: Evaluator,
    relief: Relief,
    voters: Sequence[Voter],
) -> int:
    """Train from `start` to the last step, and return its number. A collective.

    Ends earlier where an evaluation says so.

    A step that all ranks drop, because one of them ran out of memory, is taken again. Raises PreemptedError,
    on all ranks after the same step, if any of them was asked to stop.
    """
    task.network.train()
    if start.owes_evaluation:
        position = course.position_of(start.step)
        measured = evaluator.evaluate(position)
        checkpoints.after(position, measured)
        if measured is not None and measured.stops:
            return position.step
    monitor.restart_timer()
    step = start.step
    while step < course.total_steps:
        position = course.position_of(step + 1)
        try:
            checkpoints.vote(position)
            for voter in voters:
                voter.vote(position)
            monitor.record(position, task.train_on(position))
            replicas.check(position)
            measured = evaluator.after(position)
            checkpoints.after(position, measured)
            step = position.step
            if measured is not None and measured.stops:
                break
        except DroppedStepError as dropped:
            relief.halve(dropped.position)
            checkpoints.vote_again(dropped.position)
            monitor.restart_timer()
            step = dropped.position.step - 1
    return step
