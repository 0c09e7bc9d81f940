"""Ends a run whose data set cannot read more training samples than data.max_bad, on all ranks alike."""

from __future__ import annotations

from launcher.engine import StepReport
from launcher.errors import DataError, counted
from launcher.training.progress import Position
from launcher.training.run import Run
from launcher.training.votes import Question


class BadSamples:
    """Counts the samples that this process has left out, over all ranks."""

    def __init__(self, run: Run) -> None:
        self._telemetry = run.telemetry
        self._max_bad = run.config.data.max_bad
        self._total = 0

    def after_step(self, position: Position, report: StepReport) -> None:
        if not (bad := report.votes[Question.BAD_SAMPLES]):
            return
        self._total += bad
        text = f"{counted(self._total, 'training sample')} could not be read by step {position.step}"
        logs = "logs/rank*.log names each with its error"
        if self._total > self._max_bad:
            limit = f"more than data.max_bad={self._max_bad}"
            raise DataError(f"{text}, {limit}. Correct or remove them: {logs}.")
        self._telemetry.warn(f"{text} and were left out, {bad} of them in this step; {logs}.")
