"""The confusion matrix of an evaluation, and the metrics and the classification report on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHARES = ("precision", "recall", "f1")
LAST = "weighted avg"  # the name of the last line, the longest of those that every report has


@dataclass(frozen=True)
class Confusion:
    """The number of samples by true and predicted class."""

    classes: tuple[str, ...]  # as they are shown, without control characters
    counts: NDArray[np.int64]  # [true class, predicted class]

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

    def metrics(self) -> dict[str, float]:
        """Means over the classes that occur, as of scikit-learn with zero_division=0; NaN without samples."""
        rows, total = self.table(), int(self.counts.sum())

        def mean(share: str, weights: list[int] | None = None) -> float:
            return float(np.average([row[share] for row in rows], weights=weights)) if rows else math.nan

        return {
            "accuracy": int(np.trace(self.counts)) / total if total else math.nan,
            "macro_precision": mean("precision"),
            "macro_recall": mean("recall"),
            "macro_f1": mean("f1"),
            "weighted_f1": mean("f1", [row["support"] for row in rows]),
        }

    def report(self) -> str:
        """Precision, recall, F1 and support of each class that occurs, in the form of scikit-learn's report.

        Without samples, such as where every label is ignored, its means are nan.
        """
        rows, total = self.table(), int(self.counts.sum())
        width = max([len(LAST), *(len(row["class"]) for row in rows)])

        def line(name: str, *cells: object) -> str:
            return f"{name:>{width}} " + "".join(f" {cell!s:>9}" for cell in cells)

        def mean(weights: list[int] | None = None) -> list[str]:
            if not rows:
                return ["nan"] * len(SHARES)
            return [f"{np.average([row[each] for row in rows], weights=weights):.4f}" for each in SHARES]

        return "\n".join(
            [
                line("", "precision", "recall", "f1-score", "support"),
                "",
                *(line(row["class"], *(f"{row[s]:.4f}" for s in SHARES), row["support"]) for row in rows),
                "",
                line("accuracy", "", "", f"{np.trace(self.counts) / total:.4f}" if total else "nan", total),
                line("macro avg", *mean(), total),
                line(LAST, *mean([row["support"] for row in rows]), total),
                "",
            ]
        )
