"""Reads the steps of a run, on a GPU each one step late, and passes their reports to the callbacks.

Owns the clock of the steps on the host. All ranks read the same numbers at the same step. A step that is
read one step late has been finished by the device, so that reading it waits little.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from launcher.data.batch_plan import BatchPlan
from launcher.engine import StepResult
from launcher.engine.step_timer import PARTS
from launcher.telemetry import Telemetry
from launcher.trainer.callback import CallbackList, StepMetrics
from launcher.trainer.progress import StepFlag, StepIndex, samples_of

log = logging.getLogger("launcher")


class StepReader:
    """Passes the metrics of each step to the callbacks, and adds the flags that its report carries."""

    def __init__(
        self,
        telemetry: Telemetry,
        flags: set[StepFlag],
        callbacks: CallbackList,
        plan: BatchPlan,
        reads_late: bool = True,
        first_step_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._reads_late = reads_late  # a CPU has finished a step as soon as it is launched
        self._callbacks = callbacks
        self._plan = plan
        self._telemetry = telemetry
        self._flags = flags
        self._waiting: tuple[StepIndex, StepResult, float] | None = None
        self._is_first = True
        self._first_step_done = first_step_done  # all ranks have started and compiled
        self._previous = time.perf_counter()  # when the step before ended

    def push(self, index: StepIndex, result: StepResult) -> None:
        """Pass on the step before, and keep this one. The first one of a process is passed on at once."""
        self.flush()
        now = time.perf_counter()
        self._waiting = (index, result, now - self._previous)
        self._previous = now
        if self._is_first or not self._reads_late:
            self.flush()
        if self._is_first:
            self._is_first = False
            self._first_step_done()

    def flush(self) -> None:
        """Pass on the last step; waits for the device."""
        if self._waiting is None:
            return
        (index, result, seconds), self._waiting = self._waiting, None
        report = result.read()
        if any(report.votes):
            self._flags.update(flag for flag in StepFlag if report.votes[flag])
        self._telemetry.on_step(index.epoch, index.global_step)
        if log.isEnabledFor(logging.DEBUG):
            spans = ", ".join(f"{part} {report.spans_ms.get(part, 0.0):.2f}" for part in PARTS)
            log.debug("step %d: %.2f ms: %s", index.global_step, 1e3 * seconds, spans)
        metrics = StepMetrics(report, samples_of(self._plan, index, report), seconds)
        self._callbacks.on_step_metrics(index, metrics)

    def flush_all(self) -> None:
        """Pass on the last step too, and log what is left. Before an evaluation and at the end."""
        self.flush()
        self._callbacks.on_flush()

    def restart_timer(self) -> None:
        """Restart the step timer, so that evaluation and saving are not counted."""
        self._previous = time.perf_counter()
