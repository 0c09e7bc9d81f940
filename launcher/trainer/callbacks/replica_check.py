"""The ranks' replicas are compared every `ddp.check_replicas_every_steps` steps."""

from __future__ import annotations

from launcher.engine import StepResult
from launcher.trainer.callback import Callback
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepIndex
from launcher.trainer.replica_consistency import check_replicas


class ReplicaCheck(Callback):
    """Compares the ranks' replicas every `ddp.check_replicas_every_steps` steps."""

    name = "replica_check"

    def __init__(self, context: TrainContext, every_steps: int) -> None:
        self._context, self._every_steps = context, every_steps

    def on_step_launched(self, index: StepIndex, result: StepResult) -> None:
        if index.global_step % self._every_steps == 0:
            check_replicas(self._context.stepper, self._context.ema)
