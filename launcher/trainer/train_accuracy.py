"""How many training samples a classifier gets right, counted on the device while it trains.

Owns the count of this rank and its sum over the ranks. A step adds to it without a read by the host; only
`take`, at evaluations and checkpoints, waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.data.tensors import Batch
from launcher.distributed.env import WorkerEnv
from launcher.engine.async_work import all_reduce
from launcher.recipe.contract import Loss


@dataclass
class TrainAccuracy:
    """Counts, for a recipe with classes, the training samples whose largest logit was that of the label.

    Counts nothing where the loss returns other outputs than logits [n, classes, ...] or predicted classes
    [n, ...], or where the labels are no whole numbers (mixed ones, say). Labels below 0 are left out.
    """

    env: WorkerEnv
    label: str | None  # the column with the true class; None: there are no classes

    def __post_init__(self) -> None:
        # int64 [2] on the device, since the last `take`: right, and all.
        self._counts = torch.zeros(2, dtype=torch.int64, device=self.env.device)

    def count(self, loss: Loss, batch: Batch) -> None:
        """Add a micro-batch."""
        labels, predicted = batch.get(self.label or ""), loss.outputs
        if labels is None or labels.is_floating_point() or not isinstance(predicted, Tensor):
            return
        if predicted.is_floating_point() and predicted.ndim == labels.ndim + 1:
            predicted = predicted.argmax(dim=1)
        if predicted.is_floating_point() or predicted.shape != labels.shape:
            return
        self._counts[0] += ((predicted == labels) & (labels >= 0)).sum()
        self._counts[1] += (labels >= 0).sum()

    def take(self) -> tuple[int, int]:
        """How many all ranks have counted as right, and in all, since the last call. A collective."""
        if self.label is None:
            return 0, 0
        all_reduce(self._counts, self.env.group)
        right, answered = self._counts.tolist()
        self._counts.zero_()
        return right, answered
