"""How many training samples a classifier gets right, counted on the device while it trains.

Owns the count of this rank and its sum over the ranks. A step adds to it without a read by the host; only
`settle`, at evaluations and checkpoints, waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.data.tensors import Batch
from launcher.distributed.collectives import reduce
from launcher.distributed.process_group import WorkerEnv
from launcher.recipe.contract import Loss, Recipe
from launcher.training.progress import SinceEvaluation


@dataclass
class Answers:
    """Of a recipe with classes: the training samples whose largest logit was that of the label.

    Counts nothing where the loss returns other outputs than logits [n, classes, ...] or predicted classes
    [n, ...], or where the labels are no whole numbers (mixed ones, say). Labels below 0 are left out.
    """

    env: WorkerEnv
    label: str | None  # the column with the true class; None: there are no classes
    _counts: Tensor | None = None  # int64 [2] on the device: right, and all

    @classmethod
    def of(cls, recipe: Recipe, env: WorkerEnv) -> Answers:
        return cls(env, recipe.label if recipe.classes is not None else None)

    def count(self, loss: Loss, batch: Batch) -> None:
        """Add a micro-batch."""
        labels = batch.get(self.label or "")
        if labels is None or labels.is_floating_point() or not isinstance(loss.outputs, Tensor):
            return
        predicted = loss.outputs.detach()
        if predicted.is_floating_point() and predicted.ndim == labels.ndim + 1:
            predicted = predicted.argmax(dim=1)
        if predicted.is_floating_point() or predicted.shape != labels.shape:
            return
        counts = torch.stack([(predicted == labels).sum(), (labels >= 0).sum()])
        self._counts = counts if self._counts is None else self._counts + counts

    def settle(self, since: SinceEvaluation) -> None:
        """Add what all ranks have counted, and begin anew. A collective."""
        if self.label is None:
            return
        counts, self._counts = self._counts, None
        if counts is None:
            counts = torch.zeros(2, dtype=torch.int64, device=self.env.device)
        reduce(counts, self.env.group)
        right, answered = counts.tolist()
        since.right += right
        since.answered += answered
