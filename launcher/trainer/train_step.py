"""A training step on one rank: its passes, its votes, and its end where memory is short."""

from __future__ import annotations

import warnings

from launcher.data.seeding import seed_compute
from launcher.data.tensors import Batch
from launcher.engine import EngineWarning, StepResult
from launcher.engine.step_timer import DATA
from launcher.errors import ConfigError, DataError
from launcher.recipe.contract import Loss, loss_of
from launcher.trainer.context import TrainContext
from launcher.trainer.errors.model_mistakes import unregistered_parameters
from launcher.trainer.out_of_memory import prepare_to_abandon
from launcher.trainer.progress import StepFlag, StepIndex, samples_of


class TrainStep:
    """Runs the steps of a run on this rank's batches."""

    def __init__(self, context: TrainContext) -> None:
        self.context, self.stepper = context, context.stepper
        self.network = context.model  # or the same, compiled
        # The first loss is checked for parameters that the model does not hold.
        self._checked_unregistered = False

    def run(self, index: StepIndex) -> StepResult:
        """Runs one training step: forward and backward of this rank's micro-batches, then the update."""
        if self.context.oom_message:
            # A rank that ran out of memory also abandons the next step: the others have launched that before
            # they read this one.
            return self.stepper.abandon()
        try:
            stream_exhausted = self._accumulate_gradients(index)
            if self.context.should_stop():
                # Sent with the totals of this step, after which all ranks stop.
                self.stepper.vote(StepFlag.STOP)
            result = self.stepper.step()
        except Exception as error:
            if not prepare_to_abandon(self.context, error):
                raise
            return self.stepper.abandon()
        if stream_exhausted:
            self._restart_stream(index, result)
        return result

    def _restart_stream(self, index: StepIndex, result: StepResult) -> None:
        """Begin the next pass over a stream if no rank has anything left of this one."""
        report, plan = result.read(), self.context.plan  # read at once: before the next step needs a batch
        if report.votes[StepFlag.STREAM_END] < plan.world_size:
            return
        if not samples_of(plan, index, report):
            raise DataError("the training stream is empty: a whole pass over it gave no samples.")
        self.context.batches.restart_epoch()

    def _accumulate_gradients(self, index: StepIndex) -> bool:
        """Run all passes of a step. Returns whether this rank has nothing left of the stream."""
        batches, plan = self.context.batches, self.context.plan
        self.stepper.clock.restart()
        micro_batches = batches.step(index.epoch, index.batch_idx)
        self.stepper.clock.mark(DATA)
        if bad := batches.latest_bad():
            self.stepper.vote(StepFlag.BAD_SAMPLES, bad)
        if missing := batches.missing():
            self.stepper.vote(StepFlag.MISSING_SAMPLES, missing)
        if stream_exhausted := batches.exhausted():
            self.stepper.vote(StepFlag.STREAM_END)
        for number, batch in enumerate(micro_batches):
            seed_compute(plan.seed, index.global_step, plan.rank, number, self.stepper.device)
            self.context.train_accuracy.count(self.forward_backward(batch), batch)
        return stream_exhausted

    def forward_backward(self, batch: Batch) -> Loss:
        """Forward and backward pass of a micro-batch. ConfigError where the loss ends the training mode."""
        model = self.context.model
        training = model.training  # a frozen model may override train() and never be in it
        with self.stepper.forward():
            output = loss_of(self.context.recipe.loss, self.network, batch)
        if model.training != training:
            raise ConfigError(
                "the recipe's loss left the network in evaluation mode while it is trained, which changes "
                "what batch norms and dropout do. Remove network.eval() from it: the launcher sets the mode."
            )
        if not self._checked_unregistered:
            self._checked_unregistered = True
            if text := unregistered_parameters(output.sum, self.network):
                warnings.warn(text, EngineWarning, stacklevel=2)
        self.stepper.backward(output.sum, output.count)
        return output
