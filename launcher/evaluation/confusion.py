"""The confusion matrix of an evaluation, and scikit-learn's classification report on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Confusion:
    """The number of samples by true and predicted class."""

    classes: tuple[str, ...]  # as they are shown, without control characters
    counts: np.ndarray[
        Any, np.dtype[np.int64]
    ]  # [classes, classes]: row the true class, column the predicted

    def table(self) -> list[dict[str, Any]]:
        """Precision, recall, F1 and support of each class that occurs, as numbers."""
        hits, true, predicted = np.diag(self.counts), self.counts.sum(1), self.counts.sum(0)
        return [
            {
                "class": self.classes[index],
                "precision": float(hits[index] / max(1, predicted[index])),
                "recall": float(hits[index] / max(1, true[index])),
                "f1": float(2 * hits[index] / (true[index] + predicted[index])),
                "support": int(true[index]),
            }
            for index in np.flatnonzero(true + predicted)
        ]

    def report(self) -> str:
        """Precision, recall, F1 and support of each class that occurs: scikit-learn's report."""
        from sklearn.metrics import classification_report  # takes a second to import

        cells = np.nonzero(self.counts)
        labels, predictions = (
            np.repeat(axis, self.counts[cells]) for axis in cells
        )  # the report does not depend on their order
        occurring = np.union1d(labels, predictions)
        text: str = classification_report(
            labels,
            predictions,
            labels=occurring,
            target_names=[self.classes[index] for index in occurring],
            digits=4,
            zero_division=0,
        )
        return text
