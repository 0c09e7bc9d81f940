"""Reports the steps that were skipped, and warns of losses that are not finite."""

from __future__ import annotations

from launcher.engine import StepReport
from launcher.errors import counted
from launcher.telemetry.events import OverflowEvent
from launcher.trainer.callback import Callback
from launcher.trainer.callbacks.rescue import Rescue
from launcher.trainer.progress import Position
from launcher.trainer.run import Run
from launcher.trainer.warning_log import Occurrences


class SkippedSteps(Callback):
    """Emits an event per skipped step. A bad loss that led to a rescue, just before, needs no warning."""

    name = "skipped_steps"

    def __init__(self, run: Run, rescue: Rescue) -> None:
        self._telemetry = run.telemetry
        self._rescue = rescue
        self._bad_loss_steps = Occurrences()

    def on_step_metrics(self, position: Position, report: StepReport) -> None:
        if not report.skipped:
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
        if not report.bad_losses or self._rescue.latest == position.step:
            return
        if times := self._bad_loss_steps.add():
            often = "" if times == 1 else f", as in {times} steps since this run started"
            passes = counted(report.bad_losses, "micro-batch", "es")
            self._telemetry.warn(
                f"the loss of step {position.step} was not finite in {passes}{often}, so the step was "
                "skipped. That is no overflow of the loss scale: check the samples for NaN and infinity, or "
                "lower optim.lr. Further steps are counted."
            )
