"""Objects of torchmetrics as metrics of a recipe. They do not gather by themselves: `HiddenProcessGroup`
hides the ranks.

Owns which of them can be merged. Never imports torchmetrics: a recipe that uses it has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from launcher.data.tensors import Batch
from launcher.metrics.metric import chosen, column_of, name_of

EXACT = ("dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min")  # reductions that lose nothing


def is_torchmetrics(metric: object) -> bool:
    """Whether it is a Metric or a MetricCollection of torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(metric, (module.Metric, module.MetricCollection))


def adapted(metric: Any, label: str, device: torch.device) -> Rank0Metric:
    """The object, reset and on the device, as a metric that reads the column `label` as its target."""
    metric.reset()
    metric.to(device)
    return (MergeableMetric if _is_mergeable(metric) else Rank0Metric)(metric, label)


class Rank0Metric:
    """Updated on rank 0 alone, with the outputs and labels of all ranks. Exact for any object."""

    def __init__(self, metric: Any, label: str) -> None:
        self.adapts = metric
        self.label = label
        self.columns = (label,)

    @property
    def higher_is_better(self) -> object:
        """Whether more is better, as the object declares it; for a collection by name."""
        if isinstance(self.adapts, nn.ModuleDict):
            return {name: each.higher_is_better for name, each in self.adapts.items()}
        return self.adapts.higher_is_better

    def update(self, outputs: object, batch: Batch) -> None:
        name = name_of(self)
        labels = column_of(batch, self.label, name, "Recipe.label_column=...")
        advice = "Return a single one, or write a metric around it."
        self.adapts.update(chosen(outputs, None, f"{name} of torchmetrics", advice), labels)

    def compute(self) -> object:
        return self.adapts.compute()


class MergeableMetric(Rank0Metric):
    """Updated on each rank. Rank 0 then merges the states in rank order.

    Only the states are sent, because the object may hold a whole network.
    """

    def __getstate__(self) -> dict[str, object]:
        return {"states": self.adapts.metric_state, "updates": self.adapts.update_count}

    def merge(self, other: MergeableMetric) -> None:
        sent: dict[str, Any] = vars(other)
        mine = self.adapts.metric_state
        for name, theirs in sent["states"].items():
            setattr(self.adapts, name, theirs)
        self.adapts.merge_state(mine)  # puts the states that it is given before those of the object
        self.adapts._update_count += sent["updates"]  # which merge_state leaves as it is
        self.adapts._computed = None


def _is_mergeable(metric: Any) -> bool:
    """Whether its states are complete and their reductions lose nothing.

    False for wrappers and collections, and for means, which lose the number of samples of each rank.
    """
    parts = [each for each in metric.modules() if hasattr(each, "sync_on_compute")]
    if parts != [metric] or metric.full_state_update is not False or metric.dist_sync_on_step:
        return False  # merge_state refuses the latter two
    names = [getattr(reduction, "__name__", "") for reduction in metric._reductions.values()]
    return bool(names) and all(name in EXACT for name in names)
