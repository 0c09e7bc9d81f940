"""Reports the steps that were skipped for what is not finite, and warns of losses that are not finite."""

from __future__ import annotations

from launcher.errors import counted
from launcher.telemetry.events import OverflowEvent
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import Position
from launcher.trainer.warning_log import PowerOfTenThrottle


class OverflowLogger(Callback):
    """Emits an event per skipped step that is not finite.

    A bad loss after which modules fall back to fp32 needs no warning.
    """

    name = "overflow_logger"

    def __init__(self, context: TrainContext) -> None:
        self._telemetry = context.telemetry
        self._bad_loss_steps = PowerOfTenThrottle()

    def on_step_metrics(self, position: Position, metrics: StepMetrics) -> None:
        report = metrics.report
        if not report.skipped or report.outlier:
            return
        self._telemetry.emit(
            OverflowEvent(
                position.step,
                epoch=position.epoch,
                scale=report.scale,
                ranks=list(report.culprit_ranks),
                parameters=list(report.culprit_parameters),
                bad_losses=report.bad_losses,
            )
        )
        if not report.bad_losses or metrics.falls_back:
            return
        if times := self._bad_loss_steps.add():
            often = "" if times == 1 else f", as in {times} steps since this process started"
            passes = counted(report.bad_losses, "micro-batch", "es")
            self._telemetry.warn(
                f"the loss of step {position.step} was not finite in {passes}{often}, so the step was "
                "skipped. That is no overflow of the loss scale: check the samples for NaN and infinity, or "
                "lower optim.lr. Further steps are counted."
            )
