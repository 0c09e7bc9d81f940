"""Reports and counts the steps that were skipped as outliers (precision.skip_outliers)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.errors import counted
from launcher.run_dir.result import Result
from launcher.telemetry.events import OutlierEvent
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import Position
from launcher.trainer.warning_log import PowerOfTenThrottle


class OutlierLogger(Callback):
    """Emits an event per outlier, and warns of the first, tenth, hundredth of a process."""

    name = "outliers"

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._count = 0  # since the run began
        self._warned = PowerOfTenThrottle()

    def on_step_metrics(self, position: Position, metrics: StepMetrics) -> None:
        report, telemetry = metrics.report, self._context.telemetry
        if not report.outlier:
            return
        self._count += 1
        loss, norm = report.loss, report.grad_norm
        telemetry.emit(
            OutlierEvent(position.step, epoch=position.epoch, loss=loss, grad_norm=norm, count=self._count)
        )
        if self._warned.add():
            limit = f"precision.skip_outliers={self._context.config.precision.skip_outliers:g}"
            telemetry.warn(
                f"step {position.step} was skipped as an outlier: its loss {loss:.4g} or its gradient norm "
                f"{norm:.4g} lies more than {limit} deviations above the mean of the steps before. That "
                f"makes {counted(self._count, 'outlier')} in this run."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._count = values["count"]

    def add_to_result(self, result: Result) -> Result:
        return replace(result, outlier_steps=self._count)
