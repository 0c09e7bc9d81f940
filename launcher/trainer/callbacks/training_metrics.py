"""The mean loss of the training samples since the last evaluation, and the share that was classified right.

Owns what an evaluation's record says of training, over all ranks, as they were trained on.
"""

from __future__ import annotations

from typing import Any

from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import EvalOutcome, StepIndex


class TrainingMetrics(Callback):
    """Sums over the steps since the last evaluation."""

    name = "training_metrics"

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._loss_sum = self._loss_count = 0.0
        self._right = self._answered = 0  # samples (or tokens) of a classifier

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        report = metrics.report
        if report.count and not report.bad_losses:
            self._loss_sum += report.loss * report.count
            self._loss_count += report.count

    def on_eval_start(self, index: StepIndex) -> None:
        """Set `train_loss` and `train_accuracy` for the record of the evaluation. A collective.

        Neither is set where no step has followed the last evaluation.
        """
        self._add_accuracy()
        found = {"train_loss": self._loss_sum / self._loss_count} if self._loss_count else {}
        if self._answered:
            found["train_accuracy"] = self._right / self._answered
        self._context.train_metrics = found

    def on_eval_end(self, index: StepIndex, measured: EvalOutcome) -> None:
        if measured.evaluations:
            self._loss_sum = self._loss_count = 0.0
            self._right = self._answered = 0

    def _add_accuracy(self) -> None:
        right, answered = self._context.train_accuracy.take()
        self._right += right
        self._answered += answered

    def state_dict(self) -> dict[str, Any]:
        self._add_accuracy()
        sums = {"loss_sum": self._loss_sum, "loss_count": self._loss_count}
        return sums | {"right": self._right, "answered": self._answered}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._loss_sum, self._loss_count = values["loss_sum"], values["loss_count"]
        self._right, self._answered = values["right"], values["answered"]
