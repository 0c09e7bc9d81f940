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
from launcher.recipe.contract import Loss

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
    """What has been counted, and what is yet to be compared. Never changed, but replaced by another one."""

    counts: Tensor | None = None  # int64 [2] on the device: right, and all
    pairs: tuple[tuple[Tensor, Tensor], ...] = ()  # predicted classes and labels


@dataclass
class Answers:
    """Counts, for a recipe with classes, the training samples whose largest logit was that of the label.

    Counts nothing where the loss returns other outputs than logits [n, classes, ...] or predicted classes
    [n, ...], or where the labels are no whole numbers (mixed ones, say). Labels below 0 are left out. To set
    `kept` to an earlier value forgets what has been counted since then.
    """

    env: WorkerEnv
    label: str | None  # the column with the true class; None: there are no classes
    kept: Kept = field(default_factory=Kept)  # since the last `add_to`

    def count(self, loss: Loss, batch: Batch) -> None:
        """Add a micro-batch."""
        labels, predicted = batch.get(self.label or ""), loss.outputs
        if labels is None or labels.is_floating_point() or not isinstance(predicted, Tensor):
            return
        if predicted.is_floating_point() and predicted.ndim == labels.ndim + 1:
            predicted = predicted.argmax(dim=1)
        else:
            predicted = predicted.clone()
        if predicted.is_floating_point() or predicted.shape != labels.shape:
            return
        # Copies: a data set may fill the same memory again.
        pair = predicted.flatten(), labels.flatten().clone()
        self.kept = Kept(self.kept.counts, (*self.kept.pairs, pair))
        num_kept = len(self.kept.pairs)
        if labels.numel() * num_kept >= AT_ONCE or num_kept == MOST_KEPT:
            self.kept = Kept(self._compared())

    def _compared(self) -> Tensor | None:
        """All counts, with those of the pairs."""
        counts, pairs = self.kept
        if not pairs:
            return counts
        predicted, labels = (torch.cat(each) for each in zip(*pairs, strict=True))
        found = torch.stack([(predicted == labels).sum(), (labels >= 0).sum()])
        return found if counts is None else counts + found

    def add_to(self, since: SinceEvaluation) -> None:
        """Add what all ranks have counted, and begin anew. A collective."""
        if self.label is None:
            return
        counts, self.kept = self._compared(), Kept()
        if counts is None:
            counts = torch.zeros(2, dtype=torch.int64, device=self.env.device)
        all_reduce(counts, self.env.group)
        right, answered = counts.tolist()
        since.right += right
        since.answered += answered
