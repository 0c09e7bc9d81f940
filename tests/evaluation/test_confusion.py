"""The classification report: that of scikit-learn, letter by letter."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import classification_report

from launcher.evaluation.confusion import Confusion


def report_of_sklearn(classes: tuple[str, ...], counts: np.ndarray) -> str:
    labels, predictions = (np.repeat(axis, counts[np.nonzero(counts)]) for axis in np.nonzero(counts))
    occurring = np.union1d(labels, predictions)
    text: str = classification_report(
        labels,
        predictions,
        labels=occurring,
        target_names=[classes[k] for k in occurring],
        digits=4,
        zero_division=0,
    )
    return text


@pytest.mark.parametrize("num_classes", [2, 3, 10, 40])
@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_the_report_is_that_of_scikit_learn(num_classes: int, share: float) -> None:
    random = np.random.default_rng(num_classes)
    names = tuple(f"{'a long name of class ' * (k % 2)}{k}" for k in range(num_classes))
    for _ in range(5):
        counts = random.integers(1, 500, (num_classes, num_classes))
        counts *= random.random(counts.shape) < share  # some classes never occur, or are never predicted
        counts[0, 0] += 1
        assert Confusion(names, counts).report() == report_of_sklearn(names, counts)


def test_a_report_of_no_samples_says_so() -> None:
    """Every label may be one that the metric ignores."""
    empty = Confusion(("cat", "dog"), np.zeros((2, 2), np.int64))
    assert empty.table() == []
    lines = empty.report().split("\n")
    assert [line.split() for line in lines if line] == [
        ["precision", "recall", "f1-score", "support"],
        ["accuracy", "nan", "0"],
        ["macro", "avg", "nan", "nan", "nan", "0"],
        ["weighted", "avg", "nan", "nan", "nan", "0"],
    ]
