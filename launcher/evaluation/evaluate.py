"""Exact evaluation on any number of ranks, and the classification report.

Owns the pass over a set in which every sample counts exactly once, and what is computed from its predictions.
Communicates only after the pass: ranks may have unequal shares, or none. Never changes the model: all ranks
need the same weights and buffers before they come here, and the model leaves in the mode in which it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher.data.loader import Batch, TensorData, evaluation_batches, transformed
from launcher.distributed.collectives import reduce
from launcher.distributed.process_group import WorkerEnv
from launcher.errors import ConfigError
from launcher.recipe import Recipe

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Evaluation:
    """The result over the whole set, the same on all ranks."""

    loss: float  # mean over all samples (or tokens)
    samples: int
    metrics: dict[str, float]  # accuracy, macro_precision, macro_recall, macro_f1; empty without classes
    classes: tuple[str, ...] | None
    labels: Int64Array | None  # [samples], in the order of the set
    predictions: Int64Array | None  # [samples]

    @property
    def accuracy(self) -> float | None:
        return self.metrics.get("accuracy")


class Interrupted(Exception):
    """Some rank broke the evaluation off, so there is none. Raised on all ranks alike."""


@dataclass(frozen=True)
class _Tally:
    """What a rank has found out so far; adding the tallies of all ranks gives the whole."""

    loss_sum: Tensor  # fp64 [1]
    integers: Tensor  # int64 [2 + 3 * samples]: loss count, broken off, times seen, predicted, true class

    @classmethod
    def empty(cls, num_samples: int, device: torch.device) -> _Tally:
        return cls(
            torch.zeros(1, dtype=torch.float64, device=device),
            torch.zeros(2 + 3 * num_samples, dtype=torch.int64, device=device),
        )

    @property
    def num_samples(self) -> int:
        return (len(self.integers) - 2) // 3

    @property
    def broken_off(self) -> Tensor:
        return self.integers[1]

    @property
    def seen(self) -> Tensor:
        return self.integers[2 : 2 + self.num_samples]

    @property
    def predicted(self) -> Tensor:
        return self.integers[2 + self.num_samples : 2 + 2 * self.num_samples]

    @property
    def labels(self) -> Tensor:
        """Of the rank that evaluated the sample: so all ranks come to the same metrics."""
        return self.integers[2 + 2 * self.num_samples :]


def evaluate(
    recipe: Recipe,
    model: nn.Module,
    forward_context: Callable[[], AbstractContextManager[Any]],
    data: TensorData,
    env: WorkerEnv,
    batch_size: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Measures the model on `data` (on the device, whole on every rank). Every rank has to call this.

    Raises Interrupted, on all ranks, where `interrupted` was true before a batch on any of them.
    """
    tally = _Tally.empty(len(data), env.device)
    with _evaluating(model), torch.no_grad():
        for indices, batch in evaluation_batches(data, env.rank, env.world_size, batch_size):
            if interrupted():
                tally.broken_off.fill_(1)
                break
            with forward_context():
                _add(tally, recipe, model, indices, batch)
    reduce(tally.integers, env.group)
    reduce(tally.loss_sum, env.group)
    if tally.broken_off:
        raise Interrupted
    check_every_sample_once(tally.seen, env.world_size)
    return _conclude(tally, recipe, data)


def check_every_sample_once(seen: Tensor, world_size: int) -> None:
    """seen: int64 [samples], how often each sample was evaluated over all ranks."""
    missed, repeated = int((seen == 0).sum()), int((seen > 1).sum())
    if missed or repeated:
        raise AssertionError(
            f"evaluation on {world_size} ranks missed {missed} and repeated {repeated} of {len(seen)} "
            f"samples. Each has to be evaluated exactly once: this is a bug of the launcher."
        )


def macro_metrics(confusion: Int64Array) -> dict[str, float]:
    """Accuracy, and precision, recall and F1 averaged over the classes that occur in labels or predictions.

    confusion: [classes, classes]. A quotient 0/0 counts as 0, as in scikit-learn with zero_division=0.
    """
    correct, actual, predicted = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    occurs = (actual + predicted) > 0
    return {
        "accuracy": float(correct.sum() / confusion.sum()),
        "macro_precision": float(_quotients(correct, predicted)[occurs].mean()),
        "macro_recall": float(_quotients(correct, actual)[occurs].mean()),
        "macro_f1": float(_quotients(2 * correct, actual + predicted)[occurs].mean()),
    }


def confusion_matrix(evaluation: Evaluation) -> Int64Array:
    """Counts [classes, classes]: row the true class, column the predicted one."""
    labels, predictions, classes = _classified(evaluation)
    return _confusion(labels, predictions, len(classes))


def classification_report_text(evaluation: Evaluation) -> str:
    """Precision, recall, F1 and support per class: scikit-learn's report."""
    from sklearn.metrics import classification_report  # takes a second, and is needed once, at the end

    labels, predictions, classes = _classified(evaluation)
    occurring = np.union1d(labels, predictions)
    text: str = classification_report(
        labels,
        predictions,
        labels=occurring,
        target_names=[classes[index] for index in occurring],
        digits=4,
        zero_division=0,
    )
    return text


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in its own mode again, also after an error."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _add(tally: _Tally, recipe: Recipe, model: nn.Module, indices: Tensor, batch: Batch) -> None:
    transform = recipe.eval_transform
    loss = recipe.loss(model, transformed("eval_transform", transform, batch) if transform else batch)
    tally.loss_sum.add_(loss.sum)
    tally.integers[0] += loss.count
    tally.seen.index_add_(0, indices, torch.ones_like(indices))
    if recipe.classes is None:
        return
    if loss.predictions is None or loss.predictions.shape != indices.shape:
        given = "none" if loss.predictions is None else f"shape {list(loss.predictions.shape)}"
        raise ConfigError(
            f"the recipe names classes, so its loss has to give one predicted class for each of "
            f"{len(indices)} samples; it gave {given}. Return Loss(sum, count, predictions)."
        )
    tally.predicted.index_add_(0, indices, loss.predictions.to(torch.int64))
    tally.labels.index_add_(0, indices, batch[recipe.label].to(torch.int64))


def _conclude(tally: _Tally, recipe: Recipe, data: TensorData) -> Evaluation:
    integers = tally.integers.cpu()
    loss = tally.loss_sum.item() / int(integers[0])
    if recipe.classes is None:
        return Evaluation(loss, len(data), {}, None, None, None)
    predictions, labels = integers[2 + len(data) :].view(2, len(data)).numpy()
    _check_classes(labels, predictions, len(recipe.classes))
    metrics = macro_metrics(_confusion(labels, predictions, len(recipe.classes)))
    return Evaluation(loss, len(data), metrics, recipe.classes, labels, predictions)


def _check_classes(labels: Int64Array, predictions: Int64Array, num_classes: int) -> None:
    # looks at the same numbers on all ranks, so all of them raise or none does
    for name, values in (("labels", labels), ("predictions", predictions)):
        if values.min() < 0 or values.max() >= num_classes:
            raise ConfigError(
                f"the recipe names {num_classes} classes, but its {name} go from {values.min()} to "
                f"{values.max()}. They have to lie in 0..{num_classes - 1}."
            )


def _classified(evaluation: Evaluation) -> tuple[Int64Array, Int64Array, tuple[str, ...]]:
    assert evaluation.labels is not None, "the recipe has no classes to report on"
    assert evaluation.predictions is not None
    assert evaluation.classes is not None
    return evaluation.labels, evaluation.predictions, evaluation.classes


def _confusion(labels: Int64Array, predictions: Int64Array, num_classes: int) -> Int64Array:
    cells = np.bincount(labels * num_classes + predictions, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


def _quotients(numerators: Int64Array, denominators: Int64Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    return numerators / np.maximum(denominators, 1)
