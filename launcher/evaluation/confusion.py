"""The confusion matrix of an evaluation, and the classification report on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LAST = "weighted avg"  # the name of the last line, the longest of those that every report has


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
        """Precision, recall, F1 and support of each class that occurs, in the form of scikit-learn's report.

        scikit-learn itself takes more than a second to import, at the end of every run. Without samples, such
        as where every label is ignored, its means are nan.
        """
        rows = self.table()
        width = max([len(LAST), *(len(row["class"]) for row in rows)])
        numbers = np.array([[row["precision"], row["recall"], row["f1"]] for row in rows])  # [classes, 3]
        support = [row["support"] for row in rows]
        means = {"macro avg": np.full(3, np.nan), LAST: np.full(3, np.nan)}
        correct = "nan"
        if rows:
            means = {"macro avg": numbers.mean(axis=0), LAST: np.average(numbers, axis=0, weights=support)}
            correct = f"{np.trace(self.counts) / sum(support):.4f}"

        def line(name: str, cells: Sequence[str], samples: object) -> str:
            return f"{name:>{width}} " + "".join(f" {cell:>9}" for cell in (*cells, str(samples)))

        def line_of(name: str, values: Sequence[float], samples: int) -> str:
            return line(name, [f"{value:.4f}" for value in values], samples)

        return "\n".join(
            [
                line("", ("precision", "recall", "f1-score"), "support"),
                "",
                *(line_of(row["class"], numbers[k].tolist(), row["support"]) for k, row in enumerate(rows)),
                "",
                line("accuracy", ("", "", correct), sum(support)),
                *(line_of(name, values.tolist(), sum(support)) for name, values in means.items()),
                "",
            ]
        )
