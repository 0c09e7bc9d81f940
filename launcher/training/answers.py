"""How many training samples a classifier gets right, counted on the device while it trains.

Owns the count of this rank and its sum over the ranks. A step adds to it without a read by the host; only
`add_to`, at evaluations and checkpoints, waits for the device. Predicted classes are copied, and compared
many at a time, since a call takes longer than a small batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from launcher.data.tensors import Batch
from launcher.distributed.env import WorkerEnv
from launcher.engine.works import all_reduce
from launcher.recipe.contract import Loss, Recipe
from launcher.recipe.training_aids import MIXED_LABEL

MOST_KEPT = 64  # micro-batches
AT_ONCE = 2**15  # labels: 0.5 MB with their predictions, if one micro-batch has no more


@dataclass
class SinceEvaluation:
    """The training samples (or tokens) since the last evaluation, over all ranks, as they were trained on."""

    loss_sum: float = 0.0
    loss_count: float = 0.0
    right: int = 0  # of a classifier
    answered: int = 0

    def metrics(self) -> dict[str, float]:
        """`train_loss` and `train_accuracy`, as far as there is something to divide by."""
        loss = {"train_loss": self.loss_sum / self.loss_count} if self.loss_count else {}
        return loss | ({"train_accuracy": self.right / self.answered} if self.answered else {})


class Kept(NamedTuple):
    """What `Answers` had at one time: its counts, and the first so many pairs of a list that only grows."""

    counts: Tensor | None
    pairs: list[tuple[Tensor, Tensor]]
    num_pairs: int
    num_labels: int


@dataclass
class Answers:
    """Counts, for a recipe with classes, the training samples whose largest logit was that of the label.

    Counts nothing where the loss returns other outputs than logits [n, classes, ...] or predicted classes
    [n, ...], or where the labels are no whole numbers (mixed ones, say). Labels below 0 are left out.
    """

    env: WorkerEnv
    label: str | None  # the column with the true class; None: there are no classes
    _counts: Tensor | None = None  # int64 [2] on the device: right, and all
    _kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # predicted and labels, not yet counted
    _num_kept: int = 0  # labels

    @classmethod
    def of(cls, recipe: Recipe, env: WorkerEnv) -> Answers:
        return cls(env, recipe.label if recipe.classes is not None else None)

    def count(self, loss: Loss, batch: Batch) -> None:
        """Add a micro-batch."""
        labels = batch.get(self.label or "")
        if labels is None or labels.is_floating_point() or not isinstance(loss.outputs, Tensor):
            return
        if MIXED_LABEL in batch:  # a mixed image has no one class
            return
        predicted = loss.outputs
        if predicted.is_floating_point() and predicted.ndim == labels.ndim + 1:
            predicted = predicted.argmax(dim=1)
        else:
            predicted = predicted.clone()
        if predicted.is_floating_point() or predicted.shape != labels.shape:
            return
        if labels.ndim != 1:
            predicted, labels = predicted.flatten(), labels.flatten()
        self._kept.append((predicted, labels.clone()))  # a data set may fill the same memory again
        self._num_kept += labels.numel()
        if self._num_kept >= AT_ONCE or len(self._kept) == MOST_KEPT:
            self._compare()

    def _compare(self) -> None:
        """Count what is kept."""
        if not self._kept:
            return
        predicted = torch.cat([each for each, _ in self._kept])
        labels = torch.cat([each for _, each in self._kept])
        counts = torch.stack([(predicted == labels).sum(), (labels >= 0).sum()])
        self._counts = counts if self._counts is None else self._counts + counts
        self._kept = []  # not cleared: `kept` may have returned the list
        self._num_kept = 0

    def kept(self) -> Kept:
        """What has been counted since the last `add_to`, for `restore`. Copies nothing."""
        return Kept(self._counts, self._kept, len(self._kept), self._num_kept)

    def restore(self, kept: Kept) -> None:
        """Forget what has been counted since `kept` was called."""
        self._counts, self._num_kept = kept.counts, kept.num_labels
        self._kept = kept.pairs[: kept.num_pairs]

    def add_to(self, since: SinceEvaluation) -> None:
        """Add what all ranks have counted, and begin anew. A collective."""
        if self.label is None:
            return
        self._compare()
        counts, self._counts = self._counts, None
        if counts is None:
            counts = torch.zeros(2, dtype=torch.int64, device=self.env.device)
        all_reduce(counts, self.env.group)
        right, answered = counts.tolist()
        since.right += right
        since.answered += answered
