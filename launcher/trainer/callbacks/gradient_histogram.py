"""Where the gradients lie in the range of fp16, every so many steps.

Owns when to count. The count is queued after the step on the device and
read one step late. If a step was skipped, the next one is counted instead.
"""

from __future__ import annotations

from launcher.engine import StepResult
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.diagnostics.exponents import ExponentCounts, count_exponents
from launcher.trainer.progress import Position


class GradientHistogram(Callback):
    """Counts the exponents of the reduced gradients every `every_steps` steps.

    Where they are equal on all ranks only rank 0 counts. With ddp.shard_optimizer each rank counts its
    own elements, and all count the same steps: a collective.
    """

    name = "gradient_histogram"

    def __init__(self, context: TrainContext, every_steps: int) -> None:
        shards = context.config.ddp.shard_optimizer
        self.enabled = shards or context.env.is_rank0
        self._gradients = context.stepper.own_gradients if shards else context.stepper.reduced_gradients
        self._telemetry = context.telemetry
        self._every = self._next = every_steps
        self._group = context.env.group if shards else None
        self._counts: dict[int, ExponentCounts] = {}  # by step, of those that have not been read

    def on_train_start(self, step: int) -> None:
        self._next = self._next_after(step)

    def on_step_launched(self, position: Position, result: StepResult) -> None:
        """Count the step just made, whose gradients are valid until the next backward pass."""
        if position.step >= self._next:
            self._counts[position.step] = count_exponents(self._gradients(), self._group)

    def on_step_metrics(self, position: Position, metrics: StepMetrics) -> None:
        """Emit the statistics of a step that was not skipped."""
        report = metrics.report
        counts = self._counts.pop(position.step, None)
        # Below: counted before the count of the step before was read.
        if counts is None or report.skipped or position.step < self._next:
            return
        self._next = self._next_after(position.step)
        self._telemetry.emit(counts.read(position, report.scale))

    def _next_after(self, step: int) -> int:
        return step - step % self._every + self._every
