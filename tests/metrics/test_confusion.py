"""The classification report: that of scikit-learn, letter by letter."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.metrics.confusion import Confusion
from tests.metrics.figures import FIGURES


@pytest.mark.parametrize("case", FIGURES["reports"], ids=lambda case: f"{len(case['classes'])} classes")
def test_the_report_is_that_of_scikit_learn(case) -> None:
    """Also where classes never occur, or are never predicted."""
    report = Confusion(tuple(case["classes"]), np.array(case["counts"])).report()
    assert report.split("\n") == case["report"]


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
