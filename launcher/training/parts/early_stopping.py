"""Ends a run whose metric no longer improves: early_stopping.patience.

Owns the decision, which all ranks take from the same evaluation. What it remembers is part of a run's
history, so a resumed run decides as the undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.checkpoint import Metric
from launcher.config.schema import EarlyStoppingConfig
from launcher.errors import ConfigError, counted
from launcher.evaluation.comparison import comparison
from launcher.evaluation.evaluate import Evaluation
from launcher.recipe.checks import names_to_compare_by
from launcher.training.progress import Standing, Watched


@dataclass(frozen=True)
class EarlyStopping:
    """Counts the evaluations without an improvement. `compare_by` is that of the recipe."""

    config: EarlyStoppingConfig
    compare_by: str | None
    standing: Standing

    def refuse_unknown(self, evaluations: Mapping[str, Evaluation]) -> None:
        """Raise ConfigError, on all ranks alike, for a metric that evaluations do not have."""
        metric = self.config.metric
        if self.config.patience is None or metric is None:
            return
        known = names_to_compare_by(next(iter(evaluations.values())).metrics, evaluations)
        if metric not in known:
            raise ConfigError(
                f"early_stopping.metric={metric}: the evaluations of this recipe have no such metric. "
                f"They have {', '.join(known)}."
            )

    def after(self, evaluations: Mapping[str, Evaluation], step: int) -> str:
        """Count an evaluation. Why the run stops after it; empty if it does not."""
        patience = self.config.patience
        if patience is None:
            return ""
        self.refuse_unknown(evaluations)
        found = comparison(self.config.metric or self.compare_by, evaluations)
        watched = self.standing.watched
        if not (watched is not None and watched.step == step):  # else counted before the run was restarted
            self.standing.watched = watched = self._counted(watched, found, step)
        if watched.waited < patience:
            return ""
        best = watched.best
        return (
            f"{best.name} has not improved {self._by()}in {counted(watched.waited, 'evaluation')}: "
            f"{best.value:g} after step {watched.best_step} is the best, {found.value:g} the latest"
        )

    def _counted(self, watched: Watched | None, found: Metric, step: int) -> Watched:
        """A value that is not a number improves nothing."""
        if watched is None or not watched.best.is_like(found) or math.isnan(watched.best.value):
            return Watched(found, step, 0, step)
        if found.cost < watched.best.cost - self.config.min_delta:
            return Watched(found, step, 0, step)
        return Watched(watched.best, watched.best_step, watched.waited + 1, step)

    def _by(self) -> str:
        return f"by more than {self.config.min_delta:g} " if self.config.min_delta else ""
