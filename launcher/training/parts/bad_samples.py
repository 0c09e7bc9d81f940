"""Ends a run whose data sets cannot read more samples than data.max_bad, on all ranks alike."""

from __future__ import annotations

from launcher.engine import StepReport
from launcher.errors import DataError, counted
from launcher.training.progress import Position
from launcher.training.run import Run
from launcher.training.votes import Question


def report_unreadable(run: Run, text: str, count: int) -> None:
    """Warn of `count` samples that were left out, as `text` says; DataError where these are too many."""
    limit, logs = run.config.data.max_bad, "logs/rank*.log names each with its error"
    if count > limit:
        raise DataError(f"{text}, more than data.max_bad={limit}. Correct or remove them: {logs}.")
    run.telemetry.warn(f"{text} and were left out; {logs}.")


class BadSamples:
    """Counts the training samples that this process has left out, over all ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._total = 0

    def after_step(self, position: Position, report: StepReport) -> None:
        if bad := report.votes[Question.BAD_SAMPLES]:
            self._total += bad
            text = f"{counted(self._total, 'training sample')} could not be read by step {position.step}"
            report_unreadable(self._run, f"{text} ({bad} of them in this step)", self._total)
