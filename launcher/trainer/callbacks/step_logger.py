"""The log of a run: the averages of every `train.log_every_steps` steps."""

from __future__ import annotations

import resource

import torch

from launcher.engine import StepReport
from launcher.telemetry.events import StepEvent
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepIndex
from launcher.trainer.step_times import StepTimeTotals


class StepLogger(Callback):
    """Logs the steps since the line before: the first of a process, every so many, before an evaluation."""

    name = "step_logger"

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self._every = context.config.train.log_every_steps
        self._last: StepIndex | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin a window: the steps since the last log line, and the time they took."""
        self._window: list[StepReport] = []
        self._samples = 0
        self._times = StepTimeTotals(self._context.env.world_size)

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        report = metrics.report
        is_first, self._last = self._last is None, index
        self._window.append(report)
        self._samples += metrics.samples
        self._times.add(metrics.seconds, report.spans_ms)
        if is_first or index.global_step % self._every == 0:
            self._log(index)

    def on_flush(self) -> None:
        if self._window and self._last is not None:
            self._log(self._last)

    def _log(self, index: StepIndex) -> None:
        reports, samples, times = self._window, self._samples, self._times
        self._begin()
        finite = [report for report in reports if not report.bad_losses] or reports
        weight = sum(report.count for report in finite) or 1
        latest = reports[-1]
        parts_ms = times.means()
        step_ms = parts_ms.pop("step_ms")
        del parts_ms["steps"]
        self._context.telemetry.emit(
            StepEvent(
                index.global_step,
                epoch=index.epoch,
                loss=sum(report.loss * report.count for report in finite) / weight,
                lr=latest.lr,
                grad_norm=latest.grad_norm,
                scale=latest.scale,
                skipped=latest.skipped_steps,
                samples=samples,
                samples_per_s=samples / times.seconds,
                step_ms=step_ms,
                **parts_ms,
                other_ms=max(0.0, step_ms - sum(parts_ms.values())),
                memory_bytes=_memory_bytes(self._context.env.device),
            )
        )


def _memory_bytes(device: torch.device) -> int:
    """The largest amount of memory in use so far: on the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux gives it in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
