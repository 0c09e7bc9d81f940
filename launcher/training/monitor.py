"""Logs each step's report and raises DivergedError where a run diverges.

Owns the averages between two log lines and the limits on bad steps. All ranks read the same numbers and so
come to the same verdict at the same step. Never touches the device: it reads a step one step late.
"""

from __future__ import annotations

import math
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from launcher.engine import StepReport, StepResult
from launcher.engine.diagnostics.exponents import ExponentCounts
from launcher.engine.diagnostics.step_timer import PARTS
from launcher.errors import DataError, DivergedError
from launcher.training.gradient_stats import GradientStats
from launcher.training.progress import Position, Totals
from launcher.training.run import Run, Votes

SCALES_SHOWN = 10  # the latest changes of the loss scale that an error names


@dataclass
class _Window:
    """The steps since the last log line, and the time they took."""

    reports: list[StepReport] = field(default_factory=list)
    seconds: float = 0.0


class Inspector(Protocol):
    """Looks closer once a step has gone wrong. All ranks ask the same at the same step."""

    def broken_weights(self) -> str: ...

    def explain(self, epoch: int, step: int, suspected_ranks: Sequence[int], backward: bool) -> str: ...


class Monitor:
    """Records every step of a run, in order.

    With `first_step_done` the first one is read and logged at once, and then that is called.
    """

    def __init__(
        self,
        run: Run,
        votes: Votes,
        inspector: Inspector,
        gradients: GradientStats,
        totals: Totals,
        first_step_done: Callable[[], None] | None = None,
    ) -> None:
        self._telemetry = run.telemetry
        self._limits = run.config.precision.scale
        self._every = run.config.train.log_every_steps
        self._device = run.env.device
        self._votes = votes
        self._inspector = inspector
        self._gradients = gradients
        self._scales: deque[tuple[int, float]] = deque(maxlen=SCALES_SHOWN)  # (first step, scale)
        self._waiting: tuple[Position, StepResult, ExponentCounts | None, float] | None = None
        self._previous = time.perf_counter()  # when the step before ended
        self._last: Position | None = None
        self._window = _Window()
        self._first_step_done = first_step_done
        self.totals = totals

    def record(self, position: Position, result: StepResult) -> None:
        """Take a step; report the one before, which the device has finished by now."""
        self.flush()
        now = time.perf_counter()
        self._waiting = (position, result, self._gradients.count(position.step), now - self._previous)
        self._previous = now
        if self._first_step_done is not None:
            self.log_remaining()
            done, self._first_step_done = self._first_step_done, None
            done()

    def log_remaining(self) -> None:
        """Report and log the last step too. Called before an evaluation and at the end."""
        self.flush()
        if self._window.reports and self._last is not None:
            self._log(self._last)

    def refuse_fruitless_end(
        self, position: Position, counters: Mapping[str, int], held_out_loss: float
    ) -> None:
        """Raise DivergedError where a run that has reached its last step has nothing to show for it.

        That is: no step was applied, the last one's loss was not finite, or `held_out_loss`, the mean after
        it, is not. `counters` are those of the loss scale. The same on all ranks, which may communicate.
        """
        self.log_remaining()
        bad, told = counters["bad_losses"], "so the run is not done"
        if bad:
            raise DivergedError(
                f"the loss was not finite in the last {bad} of {position.step} steps, {told}. Check the "
                f"input for NaN, lower optim.lr, or set optim.clip_norm.{self._evidence_of_last()}"
            )
        if not counters["applied"]:
            raise DivergedError(
                f"none of {position.step} steps was applied, because every gradient overflowed, {told}. "
                "Lower precision.scale.init, start with precision.scale.mode=auto, or train for more steps."
                f"{self._evidence_of_last()}"
            )
        if not math.isfinite(held_out_loss):
            raise DivergedError(
                f"the loss on the held-out set is {held_out_loss} after the last of {position.step} steps, "
                f"{told}. Check that set for NaN, lower optim.lr, or set optim.clip_norm."
            )

    def restart_timer(self) -> None:
        """Restart the step timer, so that evaluation and saving are not counted."""
        self._previous = time.perf_counter()

    def flush(self) -> None:
        """Report the last step; waits for the device."""
        if self._waiting is None:
            return
        (position, result, counts, seconds), self._waiting = self._waiting, None
        report = result.read()
        self._last = position
        self._window.reports.append(report)
        self._window.seconds += seconds
        self._votes.count(report)
        self.totals.last = report
        self.totals.samples += report.count
        self.totals.seconds += seconds
        self.totals.wire_bytes_per_step = report.wire_bytes
        self._telemetry.advance(position.epoch, position.step)
        if not self._scales or self._scales[-1][1] != report.scale:
            self._scales.append((position.step, report.scale))
        if report.skipped:
            self._report_skip(position, report)
            self._end_if_diverged(position, report)
        elif counts is not None:
            self._gradients.record(position.epoch, position.step, report.scale, counts)
        if position.step % self._every == 0:
            self._log(position)

    def _report_skip(self, position: Position, report: StepReport) -> None:
        self._telemetry.emit(
            "overflow",
            position.step,
            epoch=position.epoch,
            scale=report.scale,
            ranks=list(report.culprit_ranks),
            parameters=list(report.culprit_parameters),
            bad_losses=report.bad_losses,
        )

    def _end_if_diverged(self, position: Position, report: StepReport) -> None:
        """Raise where continuing is of no use. The same on all ranks, so the inspector may communicate."""
        if report.count == 0:
            raise DataError(
                f"step {position.step} had no sample on any rank. Each step needs at least one: check the "
                "data."
            )
        broken = self._inspector.broken_weights() if report.bad_losses else ""
        if broken:
            raise DivergedError(
                f"the loss was not finite in step {position.step}, because weights are not: {broken}. No "
                "later step can mend that. Lower optim.lr, lengthen schedule.warmup_fraction, or set "
                f"optim.clip_norm.\n{self._evidence(position, report)}"
            )
        if report.bad_loss_steps >= self._limits.max_bad_losses:
            raise DivergedError(
                f"the loss was not finite in {report.bad_loss_steps} steps in a row, the last being step "
                f"{position.step}. That is not the loss scale's fault: check the input for NaN, lower "
                f"optim.lr, or set optim.clip_norm.\n{self._evidence(position, report)}"
            )
        if report.floor_skips >= self._limits.max_floor_skips:
            at, advice = self._floor(report.scale)
            raise DivergedError(
                f"the gradient overflowed in {report.floor_skips} steps in a row{at}, the last being step "
                f"{position.step}. {advice}\n{self._evidence(position, report)}"
            )

    def _floor(self, scale: float) -> tuple[str, str]:
        """Where the gradient overflows although the scale cannot fall, and what to do about it."""
        mode, least = self._limits.mode, self._limits.min
        if mode == "none":
            return (
                " without a loss scale",
                "Lower optim.lr, or make the loss smaller. wire.dtype=fp32 has more room.",
            )
        if mode == "static":
            return (
                f" at the constant loss scale {scale:g}",
                "Lower precision.scale.init, or let it move with precision.scale.mode=dynamic.",
            )
        lower = "" if least == 1 else " Lower precision.scale.min, too."
        return (
            f" at loss scale {scale:g}, the smallest allowed",
            f"Lower optim.lr or the loss, or give it more room with precision=bf16 or fp32.{lower}",
        )

    def _evidence(self, position: Position, report: StepReport) -> str:
        """What is known of a step that ends the run: ranks, parameters, loss scale, and a closer look."""
        names = report.culprit_parameters
        parameters = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        scales = ", ".join(f"{scale:g} from step {step}" for step, scale in self._scales)
        lines = [
            f"Gradient not finite on ranks {list(report.culprit_ranks)}, in parameters: {parameters}",
            f"Loss scale: {scales}",
            self._inspector.explain(
                position.epoch, position.step, report.culprit_ranks, backward=not report.bad_losses
            ),
        ]
        return "\n".join(lines)

    def _evidence_of_last(self) -> str:
        """The evidence of the last step; empty where that was taken by an earlier process of the run."""
        if self._last is None or self.totals.last is None:
            return ""
        return f"\n{self._evidence(self._last, self.totals.last)}"

    def _log(self, position: Position) -> None:
        window, self._window = self._window, _Window()
        reports, steps = window.reports, len(window.reports)
        samples = sum(report.count for report in reports)
        finite = [report for report in reports if not report.bad_losses] or reports
        weight = sum(report.count for report in finite) or 1
        latest = reports[-1]
        self._telemetry.emit(
            "step",
            position.step,
            epoch=position.epoch,
            loss=sum(report.loss * report.count for report in finite) / weight,
            lr=latest.lr,
            grad_norm=latest.grad_norm,
            scale=latest.scale,
            skipped=latest.skipped_steps,
            samples_per_s=samples / window.seconds,
            step_ms=1e3 * window.seconds / steps,
            **{f"{part}_ms": sum(r.spans_ms.get(part, 0.0) for r in reports) / steps for part in PARTS},
            memory_bytes=_memory_bytes(self._device),
        )


def _memory_bytes(device: torch.device) -> int:
    """The largest amount of memory in use so far: on the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
