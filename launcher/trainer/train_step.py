"""What a step trains: a network, its loss and this rank's batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from launcher.data.seeding import seed_compute
from launcher.data.tensors import Batch
from launcher.engine import EngineWarning, StepResult
from launcher.engine.step_timer import DATA
from launcher.errors import DataError
from launcher.recipe.contract import Loss, loss_of
from launcher.trainer.context import TrainContext
from launcher.trainer.errors.model_mistakes import unregistered_parameters
from launcher.trainer.out_of_memory import prepare_to_abandon
from launcher.trainer.progress import Position
from launcher.trainer.step_flags import StepFlag, samples_of


@dataclass(eq=False)
class TrainStep:
    """What is trained: a network, its loss and this rank's batches."""

    context: TrainContext
    network: nn.Module  # the model, compiled or not
    loss: Callable[[nn.Module, Batch], Loss]
    checked_unregistered: bool = False  # whether a loss was: the first one is

    def __post_init__(self) -> None:
        self.stepper = self.context.stepper

    def run(self, position: Position) -> StepResult:
        """Runs one training step: forward and backward of this rank's micro-batches, then the update."""
        if self.context.oom_message:
            # A rank that ran out of memory also abandons the next step: the others have launched that before
            # they read this one.
            return self.stepper.abandon()
        try:
            stream_exhausted = self._accumulate_gradients(position)
            if self.context.should_stop():
                # Sent with the totals of this step, after which all ranks stop.
                self.stepper.vote(StepFlag.STOP)
            result = self.stepper.step()
        except Exception as error:
            if not prepare_to_abandon(self.context, error):
                raise
            return self.stepper.abandon()
        if not stream_exhausted:
            return result
        report = result.read()  # without waiting for the next step: all ranks with nothing left do so
        batches, plan = self.context.batches, self.context.plan
        if report.votes[StepFlag.STREAM_END] == plan.world_size:
            if not samples_of(plan, position, report):
                raise DataError("the training stream is empty: a whole pass over it gave no samples.")
            batches.restart_epoch()
        return result

    def _accumulate_gradients(self, position: Position) -> bool:
        """Run all passes of a step. Returns whether this rank has nothing left of the stream."""
        batches, plan = self.context.batches, self.context.plan
        self.stepper.clock.restart()
        micro_batches = batches.step(position.epoch, position.step_of_epoch)
        self.stepper.clock.mark(DATA)
        if bad := batches.latest_bad():
            self.stepper.vote(StepFlag.BAD_SAMPLES, bad)
        if missing := batches.missing():
            self.stepper.vote(StepFlag.MISSING_SAMPLES, missing)
        if stream_exhausted := batches.exhausted():
            self.stepper.vote(StepFlag.STREAM_END)
        for number, batch in enumerate(micro_batches):
            seed_compute(plan.seed, position.step, plan.rank, number, self.stepper.device)
            self.context.train_accuracy.count(self.forward_backward(batch), batch)
        return stream_exhausted

    def forward_backward(self, batch: Batch) -> Loss:
        """Forward and backward pass of a micro-batch."""
        with self.stepper.forward():
            output = loss_of(self.loss, self.network, batch)
        if not self.checked_unregistered:
            self.checked_unregistered = True
            if text := unregistered_parameters(output.sum, self.network):
                warnings.warn(text, EngineWarning, stacklevel=2)
        self.stepper.backward(output.sum, output.count)
        return output
