"""How long the steps of a run have taken, by part, and how many samples they had; evaluation excluded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.run_dir.result import Result, StepTime
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepIndex
from launcher.trainer.step_times import StepTimeTotals, slowest_rank_times


class ThroughputTotals(Callback):
    """Sums over the steps of the run, and of its last process."""

    name = "throughput_totals"

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._seconds = 0.0  # of the whole run
        self._wire_bytes_per_step = 0
        self._times = StepTimeTotals(context.env.world_size, skip_first=True)

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        report = metrics.report
        self._context.samples += metrics.samples
        self._seconds += metrics.seconds
        self._wire_bytes_per_step = report.sent_bytes
        self._times.add(metrics.seconds, report.spans_ms)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._context.samples, "seconds": self._seconds}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._context.samples, self._seconds = values["samples"], values["seconds"]

    def add_to_result(self, result: Result) -> Result:
        """A collective."""
        result = replace(
            result,
            samples_per_s=self._context.samples / self._seconds if self._seconds else None,
            training_seconds=self._seconds,  # `seconds` are those of the last process
            wire_bytes_per_step=self._wire_bytes_per_step,
        )
        times = slowest_rank_times(self._context.env, self._times, self._context.plan.shares)
        if times is None:
            return result
        # Where shares changed during the run no gain can be computed from the mean.
        if self._context.config.data.share == "auto":
            times["auto_share_gain"] = 1.0
        return replace(result, step_time=StepTime(**times))
