"""How long the steps of a run have taken, by part, and how many samples they had; evaluation excluded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.engine import StepReport
from launcher.run_dir.result import Result, StepTime
from launcher.trainer.callback import Callback
from launcher.trainer.diagnostics.host_cost import num_layers
from launcher.trainer.job import Job
from launcher.trainer.progress import Position
from launcher.trainer.step_times import StepTimes, of_the_slowest, overhead_ms
from launcher.trainer.votes import samples_of


class Totals(Callback):
    """Sums over the steps of the run, and of its last process."""

    name = "totals"

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reports = job.run.reports
        self._samples = self._seconds = 0.0  # of the whole run
        self._wire_bytes_per_step = 0
        self.latest = 0  # samples of the step that was read last
        self._times = StepTimes(job.run.env.world_size, warms_up=True)

    def on_step_metrics(self, position: Position, report: StepReport) -> None:
        seconds = self._reports.seconds
        self.latest = samples_of(self._job.plan, position, report)
        self._samples += self.latest
        self._seconds += seconds
        self._wire_bytes_per_step = report.wire_bytes
        self._times.add(seconds, report.spans_ms)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._samples, "seconds": self._seconds}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._samples, self._seconds = values["samples"], values["seconds"]

    def add_to_result(self, result: Result) -> Result:
        """A collective."""
        result = replace(
            result,
            samples_per_s=self._samples / self._seconds if self._seconds else None,
            training_seconds=self._seconds,  # `seconds` are those of the last process
            wire_bytes_per_step=self._wire_bytes_per_step,
        )
        job = self._job
        if (times := of_the_slowest(job.run.env, self._times)) is not None:
            passes, numel = job.batches.plan.micro_batches, job.run.stepper.num_trainable
            added = overhead_ms(times, job.host_ms, num_layers(job.model), passes, numel)
            result = replace(result, step_time=StepTime(**times, overhead_ms=added))
        return result
