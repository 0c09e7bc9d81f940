"""The moving average of the weights follows the steps: ema.decay."""

from __future__ import annotations

from dataclasses import replace

from launcher.engine import ExponentialMovingAverage, StepResult
from launcher.engine.rank_state import size_bytes
from launcher.run_dir.result import Result
from launcher.trainer.callback import Callback
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepIndex
from launcher.trainer.replica_consistency import ema_sha256


class EmaCallback(Callback):
    """Takes each step into the average, which checkpoints have as tensors."""

    name = "ema"

    def __init__(self, context: TrainContext, average: ExponentialMovingAverage) -> None:
        self._context = context
        self._average = average

    def on_step_launched(self, index: StepIndex, result: StepResult) -> None:
        self._average.update(index.global_step)

    def add_to_result(self, result: Result) -> Result:
        """A collective."""
        stepper = self._context.stepper
        return replace(
            result,
            evaluated_weights="ema",
            ema_sha256=ema_sha256(stepper, self._average, self._context.env),
            state_bytes=stepper.state_bytes() + size_bytes(self._average.tensors()),
        )
