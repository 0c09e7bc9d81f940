"""Records each step's report: in the log, in the run's totals, in the votes and the divergence check.

Owns the averages between two log lines. All ranks read the same numbers at the same step. Never touches the
device: it reads a step one step late.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from launcher.engine import StepReport, StepResult
from launcher.engine.diagnostics.exponents import ExponentCounts
from launcher.engine.diagnostics.step_timer import PARTS
from launcher.errors import DataError, counted
from launcher.telemetry.events import OverflowEvent, StepEvent
from launcher.training.occurrences import Occurrences
from launcher.training.parts.divergence import DivergenceCheck
from launcher.training.parts.gradient_stats import GradientStats
from launcher.training.parts.relief import DroppedStepError
from launcher.training.parts.rescue import Rescue
from launcher.training.parts.step_times import StepTimes, parts_of
from launcher.training.progress import Position, Totals
from launcher.training.run import Question, Run, Voter, Votes

log = logging.getLogger("launcher")


@dataclass
class _Window:
    """The steps since the last log line, and the time they took."""

    reports: list[StepReport] = field(default_factory=list)
    seconds: float = 0.0


class Monitor:
    """Records every step of a run, in order.

    With `first_step_done` the first step is read and logged at once, and then it is called.
    """

    def __init__(
        self,
        run: Run,
        votes: Votes,
        divergence: DivergenceCheck,
        rescue: Rescue,
        gradients: GradientStats,
        totals: Totals,
        voters: Sequence[Voter],
        first_step_done: Callable[[], None] | None = None,
    ) -> None:
        self._telemetry = run.telemetry
        self._every = run.config.train.log_every_steps
        self._max_bad = run.config.data.max_bad
        self._device = run.env.device
        self._votes = votes
        self._divergence = divergence
        self._rescue = rescue
        self._gradients = gradients
        self._waiting: tuple[Position, StepResult, ExponentCounts | None, float] | None = None
        self._previous = time.perf_counter()  # when the step before ended
        self._last: Position | None = None
        self._window = _Window()
        self._first_step_done = first_step_done
        self._bad_loss_steps = Occurrences()
        self.totals = totals
        self._voters = voters
        self.times = StepTimes(run.env.world_size)
        self._world_size = run.env.world_size

    def record(self, position: Position, result: StepResult) -> None:
        """Record a step; report the one before, which the device has finished by now."""
        self.flush()
        now = time.perf_counter()
        self._waiting = (position, result, self._gradients.count(position.step), now - self._previous)
        self._previous = now
        if self._first_step_done is not None:
            self.log_remaining()
            done, self._first_step_done = self._first_step_done, None
            done()
        if self._rescue.active:
            self.flush()  # before the next step, which may be the first of the rescued modules

    def log_remaining(self) -> None:
        """Report and log the last step too. Called before an evaluation and at the end."""
        self.flush()
        if self._window.reports and self._last is not None:
            self._log(self._last)

    def refuse_fruitless_end(
        self, position: Position, counters: Mapping[str, int], held_out_loss: float
    ) -> None:
        """Log the last step, then raise DivergedError if the run has no usable result.

        The arguments are those of `DivergenceCheck.at_end`.
        """
        self.log_remaining()
        self._divergence.at_end(position, counters, held_out_loss)

    def restart_timer(self) -> None:
        """Restart the step timer, so that evaluation and saving are not counted."""
        self._previous = time.perf_counter()

    def flush(self) -> None:
        """Report the last step; waits for the device. Raises DroppedStepError for one to be taken again."""
        if self._waiting is None:
            return
        (position, result, counts, seconds), self._waiting = self._waiting, None
        report = result.read()
        if report.abandoned_ranks:
            raise DroppedStepError(position)
        self._last = position
        self._window.reports.append(report)
        self._window.seconds += seconds
        for voter in self._voters:
            voter.after(position, report)
        if any(report.votes):
            self._votes.count(report)
            self._count_bad_samples(position, report)
        self.totals.add(report, seconds)
        self.times.add(seconds, report.spans_ms)
        self._telemetry.advance(position.epoch, position.step)
        if log.isEnabledFor(logging.DEBUG):
            spans = ", ".join(f"{part} {report.spans_ms.get(part, 0.0):.2f}" for part in PARTS)
            log.debug("step %d: %.2f ms: %s", position.step, 1e3 * seconds, spans)
        if report.skipped:
            self._report_skip(position, report, self._rescue.after(position, report))
        self._divergence.after(position, report)
        if counts is not None and not report.skipped:
            self._gradients.record(position.epoch, position.step, report.scale, counts)
        if position.step % self._every == 0:
            self._log(position)

    def _count_bad_samples(self, position: Position, report: StepReport) -> None:
        """Raise DataError, on all ranks alike, where more samples were left out than may be."""
        if not (bad := report.votes[Question.BAD_SAMPLES]):
            return
        total = self._votes.bad_samples
        text = f"{counted(total, 'training sample')} could not be read by step {position.step}"
        logs = "logs/rank*.log names each with its error"
        if total > self._max_bad:
            limit = f"more than data.max_bad={self._max_bad}"
            raise DataError(f"{text}, {limit}. Correct or remove them: {logs}.")
        self._telemetry.warn(f"{text} and were left out, {bad} of them in this step; {logs}.")

    def _report_skip(self, position: Position, report: StepReport, rescued: bool) -> None:
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
        if report.bad_losses and not rescued:
            self._warn_of_bad_loss(position.step, report.bad_losses)

    def _warn_of_bad_loss(self, step: int, micro_batches: int) -> None:
        times = self._bad_loss_steps.add()
        if times == 1:
            self._telemetry.warn(
                f"the loss of step {step} was not finite in {counted(micro_batches, 'micro-batch', 'es')}, "
                "so the step was skipped. That is no overflow of the loss scale: check the samples for NaN "
                "and infinity, or lower optim.lr. Further steps are counted."
            )
        elif times:
            self._telemetry.warn(
                f"the loss was not finite in {times} steps since this run started, the last "
                f"being step {step}: these were skipped. Check the samples for NaN and infinity."
            )

    def _log(self, position: Position) -> None:
        window, self._window = self._window, _Window()
        reports, steps = window.reports, len(window.reports)
        samples = sum(report.count for report in reports)
        finite = [report for report in reports if not report.bad_losses] or reports
        weight = sum(report.count for report in finite) or 1
        latest = reports[-1]
        spans = {part: sum(report.spans_ms.get(part, 0.0) for report in reports) / steps for part in PARTS}
        parts_ms = parts_of(spans, self._world_size)
        step_ms = 1e3 * window.seconds / steps
        self._telemetry.emit(
            StepEvent(
                position.step,
                epoch=position.epoch,
                loss=sum(report.loss * report.count for report in finite) / weight,
                lr=latest.lr,
                grad_norm=latest.grad_norm,
                scale=latest.scale,
                skipped=latest.skipped_steps,
                samples=samples,
                samples_per_s=samples / window.seconds,
                step_ms=step_ms,
                **parts_ms,
                other_ms=max(0.0, step_ms - sum(parts_ms.values())),
                memory_bytes=_memory_bytes(self._device),
            )
        )


def _memory_bytes(device: torch.device) -> int:
    """The largest amount of memory in use so far: on the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
