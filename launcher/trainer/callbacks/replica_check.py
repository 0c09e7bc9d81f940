"""The ranks' replicas are compared every `ddp.check_replicas_every_steps` steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from launcher.engine import StepResult
from launcher.trainer.callback import Callback
from launcher.trainer.progress import Course, Position
from launcher.trainer.replicas import check_replicas
from launcher.trainer.run import Run


@dataclass(frozen=True)
class ReplicaCheck(Callback):
    """Compares the ranks' replicas every `ddp.check_replicas_every_steps` steps."""

    name: ClassVar[str] = "replica_check"

    run: Run
    course: Course

    def on_step_launched(self, position: Position, result: StepResult) -> None:
        if self.course.checks_after(position.step):
            check_replicas(self.run.stepper, self.run.average)
