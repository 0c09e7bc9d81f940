"""Where the gradients lie in the range of fp16, every so many steps.

Owns when to count. The count is queued after the step on the device, and read one step late. A step that was
skipped has nothing to show.
"""

from __future__ import annotations

from launcher.engine import StepResult
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.diagnostics.exponents import ExponentCounts, count_exponents
from launcher.trainer.progress import StepIndex


class GradientHistogram(Callback):
    """Counts the exponents of the reduced gradients every `every_steps` steps.

    With ddp.shard_optimizer each rank counts its own elements, a collective; else the gradients are equal on
    all ranks.
    """

    name = "gradient_histogram"

    def __init__(self, context: TrainContext, every_steps: int) -> None:
        shards = context.config.ddp.shard_optimizer
        self._gradients = context.stepper.own_gradients if shards else context.stepper.reduced_gradients
        self._telemetry = context.telemetry
        self._every = every_steps
        self._group = context.env.group if shards else None
        self._counts: dict[int, ExponentCounts] = {}  # by step, of those that have not been read

    def on_step_launched(self, index: StepIndex, result: StepResult) -> None:
        """Count the step just made, whose gradients are valid until the next backward pass."""
        if index.global_step % self._every == 0:
            self._counts[index.global_step] = count_exponents(self._gradients(), self._group)

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        """Emit the statistics of a step that was not skipped."""
        report = metrics.report
        counts = self._counts.pop(index.global_step, None)
        if counts is not None and not report.skipped:
            self._telemetry.emit(counts.read(index, report.scale))
