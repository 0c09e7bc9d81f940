"""Ends a run whose data sets cannot read more samples than data.max_bad_samples, on all ranks alike."""

from __future__ import annotations

from launcher.engine import StepReport
from launcher.errors import DataError, counted
from launcher.trainer.callback import Callback
from launcher.trainer.progress import Position
from launcher.trainer.run import Run
from launcher.trainer.votes import Question


def report_unreadable(run: Run, text: str, count: int) -> None:
    """Warn of `count` samples that were left out, as `text` says; DataError where these are too many."""
    limit, logs = run.config.data.max_bad_samples, "logs/rank*.log names each with its error"
    if count > limit:
        raise DataError(f"{text}, more than data.max_bad_samples={limit}. Correct or remove them: {logs}.")
    run.telemetry.warn(f"{text} and {'was' if count == 1 else 'were'} left out; {logs}.")


class BadSamples(Callback):
    """Counts the training samples that an epoch has left out, over all ranks."""

    name = "bad_samples"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._epoch = self._bad = 0

    def on_step_metrics(self, position: Position, report: StepReport) -> None:
        if bad := report.votes[Question.BAD_SAMPLES]:
            # Anew in each epoch, which reads each sample once: what is counted are samples, not reads.
            self._bad = bad + (self._bad if position.epoch == self._epoch else 0)
            self._epoch = position.epoch
            text = f"{counted(self._bad, 'training sample')} of epoch {position.epoch + 1} could not be read"
            text = f"{text} by step {position.step} ({bad} of them in this step)"
            report_unreadable(self._run, text, self._bad)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "bad": self._bad}

    def load_state_dict(self, values: dict[str, int]) -> None:
        self._epoch, self._bad = values["epoch"], values["bad"]
