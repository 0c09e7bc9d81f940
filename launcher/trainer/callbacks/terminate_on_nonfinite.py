"""Raises DivergedError if continuing a run is useless, with the evidence of its last step.

Owns the limits on bad steps. All ranks check the same numbers and raise at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from launcher.config.schema import LossScaleConfig
from launcher.engine import StepReport
from launcher.errors import DataError, DivergedError, listed
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.diagnostics.nonfinite_inspector import MAX_NAMES, NonFiniteInspector
from launcher.trainer.progress import EvalOutcome, StepIndex

FALLBACK = "If a module below made it, precision.fp32_fallback=true computes it in fp32."
ADVICE = "Check the input for NaN, and normalise it; lower optim.lr, or set optim.clip_norm."


@dataclass
class TerminateOnNonFinite(Callback):
    """Checks each step's report in order, and the end of the run. `counters` are those of the loss scale."""

    name: ClassVar[str] = "divergence"

    limits: LossScaleConfig
    inspector: NonFiniteInspector
    counters: Callable[[], Mapping[str, int]]
    _last: tuple[StepIndex, StepReport] | None = None

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        """Raise DivergedError or DataError if no later step can recover.

        The same on all ranks, so the inspector may communicate.
        """
        report = metrics.report
        self._last = (index, report)
        if not report.skipped:
            return
        if report.count == 0:
            raise DataError(
                f"step {index.global_step} had no sample that carries loss on any rank. Each step needs at "
                "least one: check the data and its labels."
            )
        self._refuse_bad_losses(index, report)
        if report.skips_at_min_scale >= self.limits.max_skips_at_min_scale:
            at, advice = self._floor(report)
            raise DivergedError(
                f"the gradient overflowed in {report.skips_at_min_scale} steps with none applied between "
                f"them{at}, the last being step {index.global_step}. {advice} {FALLBACK}\n"
                f"{self._evidence(index, report)}"
            )

    def on_train_end(self, index: StepIndex, measured: EvalOutcome) -> None:
        """Raise DivergedError if a run that has reached its last step has no usable result.

        That is: no step was applied, a loss after the last applied step was not finite, or that on the
        held-out set is not.
        The same on all ranks, which may communicate.
        """
        counters, held_out_loss = self.counters(), measured.loss
        bad, outcome = counters["bad_loss_steps"], "so the run is not done"
        if bad:
            raise DivergedError(
                f"the loss was not finite in {bad} of the last steps, none of which was applied, {outcome}. "
                f"{ADVICE}{self._evidence_of_last()}"
            )
        if not counters["applied_steps"]:
            raise DivergedError(
                f"none of {index.global_step} steps was applied, because every gradient overflowed, "
                f"{outcome}. Lower precision.loss_scale.init_scale, or train for more steps."
                f"{self._evidence_of_last()}"
            )
        if not math.isfinite(held_out_loss):
            raise DivergedError(
                f"the loss on the held-out set is {held_out_loss} after the last of {index.global_step} "
                f"steps, {outcome}. Check that set for NaN, lower optim.lr, or set optim.clip_norm."
            )

    def _refuse_bad_losses(self, index: StepIndex, report: StepReport) -> None:
        if report.bad_losses and (broken := self.inspector.broken_weights()):
            raise DivergedError(
                f"the loss was not finite in step {index.global_step}, because weights are not: {broken}. No "
                "later step can recover. Lower optim.lr, lengthen schedule.warmup_fraction, or set "
                f"optim.clip_norm.\n{self._evidence(index, report)}"
            )
        if report.bad_loss_steps >= self.limits.max_bad_losses:
            raise DivergedError(
                f"the loss was not finite in {report.bad_loss_steps} steps with none applied between them, "
                f"the last being step {index.global_step}. That is not the loss scale's fault. "
                f"{ADVICE}{'' if self.limits.mode == 'none' else f' {FALLBACK}'}\n"
                f"{self._evidence(index, report)}"
            )

    def _floor(self, report: StepReport) -> tuple[str, str]:
        """The scale at which the gradient overflows although it cannot fall, and what to do, as texts."""
        if self.limits.mode == "none":
            advice = "Lower optim.lr, or make the loss smaller. ddp.gradient_dtype=fp32 has more room."
            return " without a loss scale", advice
        if self.limits.mode == "static":
            advice = "Lower precision.loss_scale.init_scale, or let it move with its mode=dynamic."
            return f" at the constant loss scale {report.scale:g}", advice
        advice = "Lower optim.lr or the loss, or give it more room with precision=bf16 or fp32."
        lower = "" if self.limits.min_scale == 1 else " Lower precision.loss_scale.min_scale, too."
        return f" at loss scale {report.scale:g}, the smallest allowed", advice + lower

    def _evidence(self, index: StepIndex, report: StepReport) -> str:
        """The evidence of a step that ends the run: ranks, parameters, loss scale, and the inspection."""
        names = listed(report.culprit_parameters, MAX_NAMES)
        seen = self.inspector.explain(index, report.culprit_ranks, not report.bad_losses)
        return (
            f"Gradient not finite on ranks {list(report.culprit_ranks)}, in parameters: {names}\n"
            f"Loss scale: {report.scale:g}\n{seen}"
        )

    def _evidence_of_last(self) -> str:
        """The evidence of the last step; empty if an earlier process of the run took that step."""
        return f"\n{self._evidence(*self._last)}" if self._last is not None else ""
