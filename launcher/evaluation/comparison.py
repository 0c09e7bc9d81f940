"""Which number of an evaluation runs are compared by, and which way it is better."""

from __future__ import annotations

from launcher.checkpoint import Metric as Compared
from launcher.errors import ConfigError
from launcher.evaluation.evaluate import Evaluation
from launcher.recipe import refuse_unknown_comparison


def comparison(compare_by: str | None, evaluation: Evaluation) -> Compared:
    """The number named by Recipe.compare_by; None is the accuracy where it was measured, else the loss.

    Raises ConfigError for an unknown name, and for a metric that does not say which way it is better. All
    ranks hold the same evaluation, so all raise or none.
    """
    refuse_unknown_comparison(compare_by, evaluation.metrics)
    name = compare_by or ("accuracy" if evaluation.higher_is_better.get("accuracy") else "loss")
    if name == "loss":
        return Compared(name, evaluation.loss, lower_is_better=True)
    higher = evaluation.higher_is_better[name]
    if higher is None:
        raise ConfigError(
            f"the recipe's compare_by={name!r}: its metric does not say which way is better. Set "
            f"higher_is_better in its class: True, False, or a mapping such as {{{name!r}: True}}."
        )
    return Compared(name, evaluation.metrics[name], lower_is_better=not higher)
