"""Metrics of a classifier, from one matrix of counts: accuracy, precision, recall, F1; and top-5 accuracy.

Owns the formulas; all sums are integers, the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.data.labels import IGNORED
from launcher.data.tensors import Batch
from launcher.errors import ConfigError, DataError, counted
from launcher.metrics.confusion import Confusion
from launcher.metrics.metric import Outputs, chosen, column_of, shape_text

Int64Array = NDArray[np.int64]

OF_COUNTS = ("accuracy", "macro_precision", "macro_recall", "macro_f1", "weighted_f1")
TOP = 5


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
        # Of the samples so far; empty before the first. `cells` is int64 [classes^2 + 3]: the confusion
        # matrix, then the samples that are left out, whose label is no class, whose prediction is no class.
        self._sums: dict[str, Tensor] = {}
        if not self.classes:
            raise ConfigError("Classification needs at least one class: give it the names of the classes.")

    higher_is_better = True

    @property
    def names(self) -> tuple[str, ...]:
        """What `compute` may return: without logits only the first five."""
        of_logits = ("top5_accuracy",) if len(self.classes) > TOP else ()
        return tuple(self.prefix + name for name in (*OF_COUNTS, *of_logits))

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add the samples of a batch. Raises ConfigError for outputs that do not fit the labels."""
        given = chosen(outputs, self.output, "Classification")
        advice = "Recipe.label_column=..., or Classification(classes, label=...)"
        labels = column_of(batch, self.label, "Classification", advice)
        flat, labels = self._flat(given, labels), labels.reshape(-1).long()
        predicted = flat.argmax(dim=1) if flat.ndim == 2 else flat.long()
        num_classes = len(self.classes)
        cell = labels * num_classes + predicted
        cell = torch.where((predicted < 0) | (predicted >= num_classes), num_classes**2 + 2, cell)
        cell = torch.where((labels < 0) | (labels >= num_classes), num_classes**2 + 1, cell)
        kept = torch.ones_like(labels, dtype=torch.bool)
        if self.ignore_index is not None:
            kept = labels != self.ignore_index
            cell = torch.where(kept, cell, num_classes**2)
        if "cells" not in self._sums:
            self._sums["cells"] = cell.new_zeros(num_classes**2 + 3)
        # Not bincount, which waits for the device to know its length; in place, because it may be large.
        self._sums["cells"].index_add_(0, cell, torch.ones_like(cell))
        if flat.ndim == 2:
            self._add(_of_logits(flat, labels, kept))

    def merge(self, other: Classification) -> None:
        """Add the samples that `other` has seen."""
        self._add(other._sums)

    def compute(self) -> Mapping[str, float]:
        """All that the outputs allow; NaN where no sample was counted."""
        matrix = self.confusion_matrix()
        found = Confusion(self.classes, matrix).metrics()
        if "top5" in self._sums:
            samples = int(matrix.sum())
            found["top5_accuracy"] = int(self._sums["top5"]) / samples if samples else float("nan")
        if int(self._sums.get("nans", 0)):
            found = dict.fromkeys(found, float("nan"))
        return {self.prefix + name: value for name, value in found.items()}

    def confusion_matrix(self) -> Int64Array:
        """Counts [classes, classes]: row the true class, column the predicted one.

        Raises DataError for labels, ConfigError for predictions that name no class.
        """
        num_classes = len(self.classes)
        if not self._sums:
            return np.zeros((num_classes, num_classes), dtype=np.int64)
        cells: Int64Array = self._sums["cells"].cpu().numpy()
        wrong_labels, wrong_predictions = cells[-2:].tolist()
        outside = f"outside 0..{num_classes - 1}, which the {num_classes} classes are"
        if wrong_labels:
            raise DataError(
                f"{counted(wrong_labels, 'label')} {outside}. Correct them, or name all classes; if they are "
                f"{IGNORED}, Classification(classes, ignore_index={IGNORED}) leaves them out."
            )
        if wrong_predictions:
            raise ConfigError(f"{counted(wrong_predictions, 'prediction')} {outside}.")
        return cells[: num_classes**2].reshape(num_classes, num_classes)

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

    def _add(self, more: Mapping[str, Tensor]) -> None:
        for name, value in more.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()


def _of_logits(logits: Tensor, labels: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Numbers of samples that only logits [samples, classes] tell: with a NaN, and among the top 5."""
    spread = logits.amax(dim=1) - logits.amin(dim=1)  # NaN where a logit is, or all are infinite
    found = {"nans": (spread.isnan() & kept).sum()}
    if logits.shape[1] > TOP:
        of_label = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])
        lower_class = torch.arange(logits.shape[1], device=labels.device) < labels[:, None]
        ahead = ((logits > of_label) | ((logits == of_label) & lower_class)).sum(dim=1)
        found["top5"] = ((ahead < TOP) & kept).sum()
    return found
