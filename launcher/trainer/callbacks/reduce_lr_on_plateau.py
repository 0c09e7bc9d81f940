"""Lowers the learning rate where the metric no longer improves: reduce_lr_on_plateau.factor.

As `torch.optim.lr_scheduler.ReduceLROnPlateau` with threshold_mode="rel" and without cooldown. All ranks take
the decision from the same evaluation, and the check of the replicas compares their rates.
"""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

from launcher.checkpoint.run_state import MonitoredMetric
from launcher.config.schema import ReduceLROnPlateauConfig
from launcher.errors import ConfigError
from launcher.evaluation.evaluate import monitored_metric
from launcher.trainer.callback import Callback
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import EvalOutcome, StepIndex


class ReduceLROnPlateau(Callback):
    """Multiplies the rate by `factor` after more than `patience` evaluations in a row that were no better."""

    name = "reduce_lr_on_plateau"

    def __init__(self, context: TrainContext, config: ReduceLROnPlateauConfig) -> None:
        if context.recipe.schedule is not None:
            raise ConfigError(
                "reduce_lr_on_plateau.factor: excludes the recipe's own schedule, which sets the rate of "
                "each step."
            )
        self._context = context
        self._config = config
        self._compare_by = context.recipe.monitor
        self._rate = context.stepper.lr  # the learning rate of the config
        self._factor_so_far = 1.0  # the product of all reductions so far
        self._best: MonitoredMetric | None = None
        self._num_bad_evals = 0  # evaluations in a row that were no better
        self._step = 0  # of the latest evaluation, which a restarted run repeats

    def on_eval_end(self, index: StepIndex, measured: EvalOutcome) -> None:
        if not measured.evaluations or index.global_step == self._step:
            return
        self._step = index.global_step
        found = monitored_metric(self._config.metric or self._compare_by, measured.evaluations)
        if self._improves(found):
            self._best, self._num_bad_evals = found, 0
            return
        self._num_bad_evals += 1
        if self._num_bad_evals > self._config.patience:
            assert self._config.factor is not None
            self._factor_so_far, self._num_bad_evals = self._factor_so_far * self._config.factor, 0
            rate = self._context.stepper.lr = self._rate * self._factor_so_far
            text = f"{rate:g} from step {index.global_step + 1} on: {found.name} is at a plateau"
            self._context.telemetry.decision("learning rate", text)

    def _improves(self, found: MonitoredMetric) -> bool:
        """A value that is not a number improves nothing, and anything else is better than nothing."""
        best = self._best
        if best is None or not best.same_metric(found):
            return not math.isnan(found.value)
        return found.cost < best.cost * (1 + self._config.threshold * (-1 if best.lower_is_better else 1))

    def state_dict(self) -> dict[str, Any]:
        best = None if self._best is None else list(astuple(self._best))
        return {"share": self._factor_so_far, "best": best, "bad": self._num_bad_evals, "step": self._step}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._factor_so_far, self._num_bad_evals, self._step = values["share"], values["bad"], values["step"]
        self._best = None if values["best"] is None else MonitoredMetric(*values["best"])
        if self._factor_so_far != 1.0:  # the rate is not part of the Stepper's state
            self._context.stepper.lr = self._rate * self._factor_so_far
