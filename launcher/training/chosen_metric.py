"""The metric of the evaluations that a key of the config chooses: early_stopping.metric and its like."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.errors import ConfigError
from launcher.evaluation.evaluate import Evaluation
from launcher.recipe.checks import names_to_compare_by


def refuse_unknown(section: str, metric: str | None, evaluations: Mapping[str, Evaluation]) -> None:
    """Raise ConfigError, on all ranks alike, for a metric that evaluations do not have."""
    if metric is None:
        return
    known = names_to_compare_by(next(iter(evaluations.values())).metrics, evaluations)
    if metric not in known:
        raise ConfigError(
            f"{section}.metric={metric}: the evaluations of this recipe have no such metric. "
            f"They have {', '.join(known)}."
        )


def refuse_none(key: str, value: object, evaluations: Mapping[str, Evaluation]) -> None:
    """Raise ConfigError for a key that needs evaluations in a run without any."""
    if not evaluations:
        raise ConfigError(
            f"{key}={value} needs evaluations, and data.val_fraction=0 holds nothing out to evaluate on. Set "
            "one of them to another value."
        )
