"""Metrics of a classifier, from one matrix of counts: accuracy, precision, recall, F1; and top-5 accuracy.

Owns the formulas; all sums are integers, the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.data.labels import IGNORED, OF_IGNORED
from launcher.data.tensors import Batch
from launcher.errors import ConfigError, DataError
from launcher.metrics.metric import Outputs, chosen, column_of, shape_text

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]

OF_COUNTS = ("accuracy", "macro_precision", "macro_recall", "macro_f1", "weighted_f1")
TOP = 5
MOST_NUMBERS = 4_000_000  # of outputs that wait: 16 MB in fp32, whatever the number of classes
AT_ONCE = 4096  # samples that are counted together: some 40 operations, which cost as much for 128


class Classification:
    """Metrics of a classifier: `accuracy`, `macro_precision`, `macro_recall`, `macro_f1`, `weighted_f1`.

    Of logits also `top5_accuracy` where there are more than 5 classes.

    Reads logits (floating point [n, classes, ...]) or predicted classes (int64 [n, ...]) as outputs, and the
    true classes `batch[label]` (integers [n, ...]). A label equal to `ignore_index` is left out. `output`
    names the entry where outputs are a mapping; `prefix` goes before each name.

    All are shares in 0..1. Precision, recall and F1 are scikit-learn's with zero_division=0; macro is the
    mean over the classes that occur among labels or predictions, weighted the mean by number of labels.
    Top-5 counts a label among the five largest logits, the lower class first where logits are equal, as
    argmax does. With a NaN among the logits all are NaN.

    Raises ConfigError for outputs of another shape and predictions that name no class, DataError for labels
    that name none.
    """

    def __init__(
        self,
        classes: Sequence[str],
        label: str = "label",
        *,
        ignore_index: int | None = None,
        output: str | None = None,
        prefix: str = "",
    ) -> None:
        self.classes = tuple(classes)
        self.label, self.ignore_index, self.output, self.prefix = label, ignore_index, output, prefix
        self._counts: dict[str, Tensor] = {}  # of the samples that are counted; none before the first
        self._waiting: list[tuple[Tensor, Tensor]] = []  # outputs and labels of batches that are not
        self._num_waiting = 0
        if not self.classes:
            raise ConfigError("Classification needs at least one class: give it the names of the classes.")

    higher_is_better = True

    @property
    def names(self) -> tuple[str, ...]:
        """What `compute` may return: without logits only the first five."""
        of_logits = ("top5_accuracy",) if len(self.classes) > TOP else ()
        return tuple(self.prefix + name for name in (*OF_COUNTS, *of_logits))

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add the samples of a batch, whose outputs must not be changed afterwards.

        Raises ConfigError for outputs that do not fit the labels.
        """
        given = chosen(outputs, self.output, "Classification")
        advice = "Recipe.label_column=..., or Classification(classes, label=...)"
        labels = column_of(batch, self.label, "Classification", advice)
        flat = self._flat(given, labels)
        self._waiting.append((flat, labels.reshape(-1).clone()))  # a batch may be reused
        self._num_waiting += labels.numel()
        if self._num_waiting >= AT_ONCE or self._num_waiting * flat[:1].numel() >= MOST_NUMBERS:
            self._count_waiting()

    def __getstate__(self) -> dict[str, object]:
        """The attributes, with all samples counted."""
        self._count_waiting()
        return vars(self)

    def _count_waiting(self) -> None:
        if not self._waiting:
            return
        outputs, labels = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        logits = outputs if outputs.ndim == 2 else None
        labels = labels.to(torch.int64)
        predicted = (outputs if logits is None else logits.argmax(dim=1)).to(torch.int64)
        keep = self.ignore_index is None or labels != self.ignore_index
        counted = torch.ones_like(labels) * keep
        self._count(labels, predicted, counted)
        kept = torch.stack([labels, predicted]) * counted  # 0, which is always a class, of what is left out
        lowest, highest = kept.aminmax(dim=1) if len(labels) else (kept.sum(dim=1), kept.sum(dim=1))
        of_logits = {} if logits is None else _of_logits(logits, labels, counted)
        self._add({"lowest": lowest, "highest": highest, "counted": counted.sum(), **of_logits})

    def merge(self, other: Classification) -> None:
        """Add the samples that `other` has seen."""
        self._count_waiting()
        other._count_waiting()
        self._add(other._counts)

    def compute(self) -> Mapping[str, float]:
        """All that the outputs allow; NaN where no sample was counted."""
        self._count_waiting()
        if not self._counts:
            return {self.prefix + name: float("nan") for name in OF_COUNTS}
        found = metrics_of_counts(self.confusion_matrix())
        counted = int(self._counts["counted"])
        if "top5" in self._counts:
            found["top5_accuracy"] = int(self._counts["top5"]) / counted if counted else float("nan")
        if int(self._counts.get("nans", 0)):
            found = dict.fromkeys(found, float("nan"))
        return {self.prefix + name: value for name, value in found.items()}

    def confusion_matrix(self) -> Int64Array:
        """Counts [classes, classes]: row the true class, column the predicted one.

        Raises DataError for labels, ConfigError for predictions that name no class.
        """
        num_classes = len(self.classes)
        self._count_waiting()
        if not self._counts:
            return np.zeros((num_classes, num_classes), dtype=np.int64)
        lowests, highests = self._counts["lowest"].tolist(), self._counts["highest"].tolist()
        for name, lowest, highest in zip(("labels", "predictions"), lowests, highests, strict=True):
            if lowest < 0 or highest >= num_classes:
                kind = DataError if name == "labels" else ConfigError
                advice = f" {OF_IGNORED}" if name == "labels" and lowest == IGNORED else ""
                raise kind(
                    f"there are {num_classes} classes, but the {name} go from {lowest} to {highest}. They "
                    f"have to lie in 0..{num_classes - 1}.{advice}"
                )
        cells: Int64Array = self._counts["cells"][:-1].cpu().numpy()
        return cells.reshape(num_classes, num_classes)

    def _flat(self, given: Tensor, labels: Tensor) -> Tensor:
        """The outputs as [samples, classes] where they are logits, [samples] where predicted classes."""
        n, *rest = labels.shape
        whole_labels = not labels.is_floating_point()
        if whole_labels and not given.is_floating_point() and given.shape == labels.shape:
            return given.reshape(-1)
        if whole_labels and given.is_floating_point() and [*given.shape] == [n, len(self.classes), *rest]:
            return given.movedim(1, -1).reshape(-1, len(self.classes))
        raise ConfigError(
            f"the outputs are {shape_text(given)}, the labels {shape_text(labels)}. Classification needs "
            f"logits {[n, len(self.classes), *rest]}, one value per sample and class, or predicted classes "
            f"int64 {list(labels.shape)}, and whole numbers as labels: return them in "
            "Loss(sum, count, outputs)."
        )

    def _count(self, labels: Tensor, predicted: Tensor, counted: Tensor) -> None:
        """Add to the cells, int64 [classes^2 + 1]: the confusion matrix, and last what is not counted."""
        num_classes = len(self.classes)
        valid = (labels >= 0) & (labels < num_classes) & (predicted >= 0) & (predicted < num_classes)
        cell = torch.where(valid & (counted > 0), labels * num_classes + predicted, num_classes**2)
        if "cells" not in self._counts:
            self._counts["cells"] = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=cell.device)
        self._counts["cells"].index_add_(0, cell, torch.ones_like(cell))  # in place: may be large

    def _add(self, more: Mapping[str, Tensor]) -> None:
        for name, value in more.items():
            together = {"lowest": torch.minimum, "highest": torch.maximum}.get(name, torch.add)
            self._counts[name] = (
                together(self._counts[name], value) if name in self._counts else value.clone()
            )


def metrics_of_counts(confusion: Int64Array) -> dict[str, float]:
    """The metrics OF_COUNTS of a matrix [classes, classes], row the true class.

    A quotient 0/0 counts as 0, as in scikit-learn with zero_division=0.
    """
    correct, actual, predicted = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    occurs = (actual + predicted) > 0
    if not occurs.any():
        return dict.fromkeys(OF_COUNTS, float("nan"))
    f1 = _quotients(2 * correct, actual + predicted)
    return {
        "accuracy": float(correct.sum() / confusion.sum()),
        "macro_precision": float(_quotients(correct, predicted)[occurs].mean()),
        "macro_recall": float(_quotients(correct, actual)[occurs].mean()),
        "macro_f1": float(f1[occurs].mean()),
        "weighted_f1": float((f1 * actual).sum() / actual.sum()),
    }


def _of_logits(logits: Tensor, labels: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Numbers of samples that only logits [samples, classes] tell: with a NaN, and among the top 5."""
    spread = logits.amax(dim=1) - logits.amin(dim=1)  # NaN where a logit is, or all are infinite
    found = {"nans": (spread.isnan() & (counted > 0)).sum()}
    if logits.shape[1] > TOP:
        of_label = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])
        lower_class = torch.arange(logits.shape[1], device=labels.device) < labels[:, None]
        ahead = ((logits > of_label) | ((logits == of_label) & lower_class)).sum(dim=1)
        found["top5"] = ((ahead < TOP) & (counted > 0)).sum()
    return found


def _quotients(numerators: Int64Array, denominators: Int64Array) -> Float64Array:
    return numerators / np.maximum(denominators, 1)
