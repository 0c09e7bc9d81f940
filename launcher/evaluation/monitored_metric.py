"""The value of an evaluation by which runs are compared or a part of one decides."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.checkpoint.run_state import MonitoredMetric
from launcher.errors import ConfigError
from launcher.evaluation.evaluate import Evaluation
from launcher.recipe.checks import MONITOR, refuse_unknown_metric


def monitored_metric(
    monitor: str | None, evaluations: Mapping[str, Evaluation], key: str = MONITOR
) -> MonitoredMetric:
    """The value named by `monitor`. None stands for the accuracy if it was measured, else the loss.

    A name such as SET/METRIC selects a set; without one it is the first.

    Raises ConfigError, which begins with `key`, for an unknown name and for a metric without
    higher_is_better. All ranks hold the same evaluation, so all ranks raise or none.
    """
    first = next(iter(evaluations.values()))
    refuse_unknown_metric(key, monitor, first.metrics, evaluations)
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
            f"{key}={name}: its metric does not declare which way is better. Set higher_is_better in its "
            f"class: True, False, or a mapping such as {{{name!r}: True}}."
        )
    return MonitoredMetric(full_name, evaluation.metrics[name], lower_is_better=not higher)
