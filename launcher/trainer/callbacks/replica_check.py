"""The ranks' replicas are compared every `ddp.check_replicas_every_steps` steps."""

from __future__ import annotations

from launcher.engine import StepResult
from launcher.trainer.callback import Callback
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import Position
from launcher.trainer.replica_consistency import check_replicas


class ReplicaCheck(Callback):
    """Compares the ranks' replicas every `ddp.check_replicas_every_steps` steps."""

    name = "replica_check"

    def __init__(self, context: TrainContext) -> None:
        self._context = context

    def on_step_launched(self, position: Position, result: StepResult) -> None:
        if self._context.length.should_check_replicas(position.step):
            check_replicas(self._context.stepper, self._context.ema)
