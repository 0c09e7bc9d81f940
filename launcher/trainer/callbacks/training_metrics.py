"""The mean loss of the training samples since the last evaluation, over all ranks."""

from __future__ import annotations

from typing import Any

from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import EvalOutcome, Position


class TrainingMetrics(Callback):
    """Sums over the steps since the last evaluation."""

    name = "training_metrics"

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._loss_sum = self._loss_count = 0.0

    def on_step_metrics(self, position: Position, metrics: StepMetrics) -> None:
        report = metrics.report
        if report.count and not report.bad_losses:
            self._loss_sum += report.loss * report.count
            self._loss_count += report.count

    def on_eval_start(self, position: Position) -> None:
        """Set `train_loss` for the record of the evaluation; none where no step has followed the last."""
        found = {"train_loss": self._loss_sum / self._loss_count} if self._loss_count else {}
        self._context.train_metrics = found

    def on_eval_end(self, position: Position, measured: EvalOutcome) -> None:
        if measured.evaluations:
            self._loss_sum = self._loss_count = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"loss_sum": self._loss_sum, "loss_count": self._loss_count}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._loss_sum, self._loss_count = values["loss_sum"], values["loss_count"]
