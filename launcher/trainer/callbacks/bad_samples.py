"""Ends a run whose data sets cannot read more samples than data.max_bad_samples, on all ranks alike."""

from __future__ import annotations

from launcher.errors import counted
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepFlag, StepIndex


class BadSampleLimit(Callback):
    """Counts the training samples that an epoch has left out, over all ranks."""

    name = "bad_samples"

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._epoch = self._bad = 0

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        report = metrics.report
        if bad := int(report.votes[StepFlag.BAD_SAMPLES]):
            # Anew in each epoch, which reads each sample once: what is counted are samples, not reads.
            self._bad = bad + (self._bad if index.epoch == self._epoch else 0)
            self._epoch = index.epoch
            text = f"{counted(self._bad, 'training sample')} of epoch {index.epoch + 1} could not be read"
            text = f"{text} by step {index.global_step} ({bad} of them in this step)"
            self._context.report_unreadable(text, self._bad)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "bad": self._bad}

    def load_state_dict(self, values: dict[str, int]) -> None:
        self._epoch, self._bad = values["epoch"], values["bad"]
