"""The value of an evaluation by which runs are compared or a part of one decides."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.checkpoint.run_state import MonitoredMetric
from launcher.errors import ConfigError
from launcher.evaluation.evaluate import Evaluation
from launcher.recipe.checks import names_to_compare_by, refuse_unknown_comparison


def monitored_metric(monitor: str | None, evaluations: Mapping[str, Evaluation]) -> MonitoredMetric:
    """The value named by Recipe.monitor. None stands for the accuracy if it was measured, else the loss.

    A name such as SET/METRIC selects a set; without one it is the first.

    Raises ConfigError for an unknown name and for a metric without higher_is_better. All ranks hold the same
    evaluation, so all ranks raise or none.
    """
    first = next(iter(evaluations.values()))
    refuse_unknown_comparison(monitor, first.metrics, evaluations)
    full_name = monitor or ("accuracy" if first.higher_is_better.get("accuracy") else "val_loss")
    evaluation, name = first, full_name
    prefix, slash, rest = full_name.partition("/")
    if slash and prefix in evaluations:
        evaluation, name = evaluations[prefix], rest
    if name == "val_loss":
        return MonitoredMetric(full_name, evaluation.loss, lower_is_better=True)
    higher = evaluation.higher_is_better[name]
    if higher is None:
        raise ConfigError(
            f"the recipe's monitor={name!r}: its metric does not declare which way is better. Set "
            f"higher_is_better in its class: True, False, or a mapping such as {{{name!r}: True}}."
        )
    return MonitoredMetric(full_name, evaluation.metrics[name], lower_is_better=not higher)


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


def check_has_evaluations(key: str, value: object, evaluations: Mapping[str, Evaluation]) -> None:
    """Raise ConfigError for a key that needs evaluations in a run without any."""
    if not evaluations:
        raise ConfigError(
            f"{key}={value} needs evaluations, and data.val_fraction=0 holds nothing out: change one of them."
        )
