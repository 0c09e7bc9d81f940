"""Ends a run whose metric no longer improves: early_stopping.patience.

Owns the decision, which all ranks take from the same evaluation. What it remembers is saved, so a resumed run
decides as the undisturbed one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.checkpoint.run_state import MonitoredMetric
from launcher.config.schema import EarlyStoppingConfig
from launcher.errors import counted
from launcher.evaluation.evaluate import monitored_metric
from launcher.run_dir.result import Result
from launcher.trainer.callback import Callback
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import EvalOutcome, StepIndex


@dataclass(frozen=True)
class PatienceState:
    """The best value, and how many evaluations were no better since then."""

    best: MonitoredMetric
    best_step: int
    waited: int
    step: int  # of the latest evaluation


class EarlyStopping(Callback):
    """Counts the evaluations without an improvement."""

    name = "early_stopping"

    def __init__(self, context: TrainContext, config: EarlyStoppingConfig) -> None:
        assert config.patience is not None
        self.stop_reason = ""
        self._context, self._config, self._patience = context, config, config.patience
        self._watched: PatienceState | None = None  # None before the first evaluation

    def on_eval_end(self, index: StepIndex, measured: EvalOutcome) -> None:
        """Count an evaluation, unless it was counted before the run was restarted."""
        if not measured.evaluations:
            return
        found = monitored_metric(self._config.metric or self._context.recipe.monitor, measured.evaluations)
        watched, step = self._watched, index.global_step
        if watched is None or watched.step != step:
            self._watched = watched = self._counted(watched, found, step)
        self.stop_reason = ""
        if watched.waited >= self._patience and not self._context.length.is_last_step(step):
            best, delta = watched.best, self._config.min_delta
            by = f"by more than {delta:g} " if delta else ""
            self.stop_reason = (
                f"{best.name} has not improved {by}in {counted(watched.waited, 'evaluation')}: "
                f"{best.value:g} after step {watched.best_step} is the best, {found.value:g} the latest"
            )
            self._context.telemetry.decision("early stopping", f"after step {step}: {self.stop_reason}")

    def _counted(self, watched: PatienceState | None, found: MonitoredMetric, step: int) -> PatienceState:
        """NaN improves nothing. While no evaluation has given a number, nothing is counted."""
        if watched is None or not watched.best.same_metric(found) or math.isnan(watched.best.value):
            return PatienceState(found, step, 0, step)
        if found.cost < watched.best.cost - self._config.min_delta:
            return PatienceState(found, step, 0, step)
        return PatienceState(watched.best, watched.best_step, watched.waited + 1, step)

    def state_dict(self) -> dict[str, Any]:
        return {"watched": None if self._watched is None else asdict(self._watched)}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        if (saved := values["watched"]) is not None:
            self._watched = PatienceState(**{**saved, "best": MonitoredMetric(**saved["best"])})
            if self._watched.waited >= self._patience:
                self.stop_reason = "it had ended when it was saved"

    def add_to_result(self, result: Result) -> Result:
        reason = {"reason": self.stop_reason, **asdict(self._config)}
        return replace(result, stopped_early=reason) if self.stop_reason else result
