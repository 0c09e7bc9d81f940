"""Objects of torchmetrics as metrics of a recipe. They do not gather by themselves: `hidden_process_group`
hides the ranks.

Never imports torchmetrics: a recipe that uses it has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from launcher.data.tensors import Batch
from launcher.metrics.metric import chosen, column_of, name_of


def is_torchmetrics(metric: object) -> bool:
    """Whether it is a Metric or a MetricCollection of torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(metric, (module.Metric, module.MetricCollection))


class Rank0Metric:
    """The object, reset and on the device, as a metric that reads the column `label` as its target.

    Updated on rank 0 alone, with the outputs and labels of all ranks. Exact for any object.
    """

    def __init__(self, metric: Any, label: str, device: torch.device) -> None:
        metric.reset()
        self.adapts = metric.to(device)
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
