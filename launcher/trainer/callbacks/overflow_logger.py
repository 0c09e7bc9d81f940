"""Reports the steps that were skipped: for what is not finite, or as outliers (precision.skip_outliers)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.engine import StepReport
from launcher.errors import counted
from launcher.run_dir.result import Result
from launcher.telemetry.events import OutlierEvent, OverflowEvent
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepIndex


class OverflowLogger(Callback):
    """Emits an event per skipped step, and warns of the first outlier and the first loss that is not finite.

    A bad loss after which modules fall back to fp32 needs no warning. Outliers are counted in the whole run.
    """

    name = "skipped_steps"

    def __init__(self, context: TrainContext) -> None:
        self._telemetry = context.telemetry
        self._limit = context.config.precision.skip_outliers
        self._outliers = 0  # since the run began
        self._warned_of_bad_loss = False  # in this process

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        report = metrics.report
        if report.outlier:
            self._report_outlier(index, report)
        elif report.skipped:
            self._telemetry.emit(
                OverflowEvent(
                    index.global_step,
                    epoch=index.epoch,
                    scale=report.scale,
                    ranks=list(report.culprit_ranks),
                    parameters=list(report.culprit_parameters),
                    bad_losses=report.bad_losses,
                )
            )
            if report.bad_losses and not (metrics.falls_back or self._warned_of_bad_loss):
                self._warned_of_bad_loss = True
                passes = counted(report.bad_losses, "micro-batch", "es")
                self._telemetry.warn(
                    f"the loss of step {index.global_step} was not finite in {passes}, so the step was "
                    "skipped. That is no overflow of the loss scale: check the samples for NaN and infinity, "
                    "or lower optim.lr. Further steps are counted."
                )

    def _report_outlier(self, index: StepIndex, report: StepReport) -> None:
        self._outliers += 1
        loss, norm, count = report.loss, report.grad_norm, self._outliers
        self._telemetry.emit(
            OutlierEvent(index.global_step, epoch=index.epoch, loss=loss, grad_norm=norm, count=count)
        )
        if count == 1:
            self._telemetry.warn(
                f"step {index.global_step} was skipped as an outlier: its loss {loss:.4g} or its gradient "
                f"norm {norm:.4g} lies more than precision.skip_outliers={self._limit:g} deviations above "
                "the mean of the steps before. Further outliers are counted."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"outliers": self._outliers}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._outliers = values["outliers"]

    def add_to_result(self, result: Result) -> Result:
        return result if self._limit is None else replace(result, outlier_steps=self._outliers)
