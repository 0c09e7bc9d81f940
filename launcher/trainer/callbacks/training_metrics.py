"""The mean loss of the training samples since the last evaluation, and the share that was classified right.

Owns what an evaluation's record says of training, over all ranks, as they were trained on.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import EvalOutcome, Position
from launcher.trainer.train_accuracy import RunningTrainMetrics


class TrainingMetrics(Callback):
    """Sums over the steps since the last evaluation."""

    name = "training_metrics"

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._train_accuracy = context.train_accuracy
        self._since = RunningTrainMetrics()
        self._evaluated: dict[str, float] = {}  # of the last evaluation, while no step has followed it

    def on_step_metrics(self, position: Position, metrics: StepMetrics) -> None:
        report = metrics.report
        self._evaluated = {}
        if report.count and not report.bad_losses:
            self._since.loss_sum += report.loss * report.count
            self._since.loss_count += report.count

    def on_eval_start(self, position: Position) -> None:
        """Set `train_loss` and `train_accuracy` for the record of the evaluation. A collective.

        A run that was killed before its result was written repeats its last evaluation: with the same ones.
        """
        self._train_accuracy.all_reduce_into(self._since)
        self._context.train_metrics = self._evaluated or self._since.metrics()

    def on_eval_end(self, position: Position, measured: EvalOutcome) -> None:
        if measured.evaluations:
            self._evaluated = self._evaluated or self._since.metrics()
            self._since = RunningTrainMetrics()

    def state_dict(self) -> dict[str, Any]:
        self._train_accuracy.all_reduce_into(self._since)
        return asdict(self._since) | {"evaluated": self._evaluated}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        since = dict(values)
        self._evaluated = since.pop("evaluated", {})
        self._since = RunningTrainMetrics(**since)
