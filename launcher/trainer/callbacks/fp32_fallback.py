"""Lets modules compute in fp32 once their outputs have left the range of fp16, and the run continue.

Owns when that is tried and what is reported of it. A loss scale cannot help there: it moves gradients, not
activations. Where gradients overflow at the smallest scale already, it cannot help either. All ranks read
the same report of the same step, search together, and change the same modules before the next step; the
skipped step has changed no weight.
"""

from __future__ import annotations

import glob
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from launcher.engine.names import named_modules
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.diagnostics.nonfinite_inspector import NonFiniteInspector
from launcher.trainer.progress import StepIndex


class Fp32Fallback(Callback):
    """Computes in fp32 in the modules that the run has found so far, and in new ones.

    New ones only where `precision.fp32_fallback` is set, and the arithmetic is half; those of the run so far
    always.
    """

    name = "fp32_fallback"

    def __init__(self, context: TrainContext, searcher: NonFiniteInspector) -> None:
        self._context = context
        self._searcher = searcher
        self._limit = context.config.precision.max_fp32_fallbacks
        self._fallbacks: list[list[str]] = []  # in order: patterns of modules now in fp32

    def state_dict(self) -> dict[str, Any]:
        return {"fallbacks": [list(patterns) for patterns in self._fallbacks]}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._fallbacks = values["fallbacks"]
        for patterns in self._fallbacks:
            self._context.stepper.compute_in_fp32(patterns)
        if self._fallbacks:
            self._record()

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        """Have further modules compute in fp32. A collective where losses or gradients were not finite."""
        report = metrics.report
        if not self._context.falls_back_to_fp32:
            return
        # With a static scale each overflow counts as one at the smallest: it may be the scale's fault.
        at_min = report.skips_at_min_scale and self._context.config.precision.loss_scale.mode != "static"
        backward = bool(report.culprit_parameters and at_min and not report.bad_losses)
        if not (report.bad_losses or backward) or self._searcher.broken_weights():
            return
        found, stepper = self._searcher.overflow(index, backward), self._context.stepper
        if found is None or found.module in stepper.fp32_modules:
            return
        why = f"{found.text} in step {index.global_step}"
        if len(self._fallbacks) >= self._limit:
            text = f"{why}: no further module computes in fp32 (precision.max_fp32_fallbacks={self._limit})."
            self._context.telemetry.warn(text)
            return
        patterns = kind_of(stepper.model, found.module)
        stepper.compute_in_fp32(patterns)
        if backward:
            stepper.restart_loss_scale()
        self._fallbacks.append(patterns)
        metrics.falls_back = True
        self._context.telemetry.decision(
            "fp32 fallback",
            f"fp32 arithmetic in {', '.join(patterns)} from step {index.global_step + 1} on; {why}. To start "
            f"with it: precision.fp32_modules={self._record()}",
            module=found.module,
            patterns=list(patterns),
        )

    def _record(self) -> list[str]:
        """Record precision.fp32_modules of a run that starts as this one continues."""
        precision = self._context.config.precision
        found = [pattern for patterns in self._fallbacks for pattern in patterns]
        modules = tuple(dict.fromkeys((*precision.fp32_modules, *found)))
        self._context.persist_config(precision=replace(precision, fp32_modules=modules))
        return list(modules)


def kind_of(model: nn.Module, name: str) -> list[str]:
    """Patterns of all modules like the one called `name`: of its type, with other numbers in their names.

    One pattern where it matches exactly these, else their names: `blocks.*.mlp` for `blocks.3.mlp`.
    """
    modules = dict(named_modules(model))
    parts = re.split(r"\d+", name)
    like = re.compile(r"\d+".join(map(re.escape, parts)))
    of_type = [each for each, module in modules.items() if type(module) is type(modules[name])]
    kind = [each for each in of_type if like.fullmatch(each)]
    pattern = "*".join(map(glob.escape, parts))
    exact = [each for each in modules if fnmatchcase(each, pattern)] == kind
    return [pattern] if exact else list(map(glob.escape, kind))
