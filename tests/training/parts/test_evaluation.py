"""Which evaluations count as the best so far."""

from __future__ import annotations

import math

import pytest

from launcher.checkpoint import Metric
from launcher.training.progress import Standing


@pytest.mark.parametrize(
    ("values", "lower_is_better", "best"),
    [
        ([0.5, 0.7, 0.6], False, [True, True, False]),
        ([0.5, 0.3, 0.4], True, [True, True, False]),
        ([0.5, 0.5, 0.5], False, [True, False, False]),
        ([0.5, 0.5, 0.5], True, [True, False, False]),
        ([0.0, -0.0], True, [True, False]),
        ([math.nan, 0.5, math.nan, 0.5], False, [False, True, False, False]),
        ([math.inf, 2.0], True, [False, True]),
        ([-math.inf, 0.0], False, [False, True]),
    ],
)
def test_only_what_is_better_than_all_before_is_a_new_best(values, lower_is_better, best) -> None:
    standing = Standing()
    found = [standing.measure(Metric("metric", value, lower_is_better), loss=1.0) for value in values]
    assert [each.is_best for each in found] == best
    assert [each.metric.value for each in found] == pytest.approx(values, nan_ok=True)


def test_what_another_metric_has_reached_is_not_compared() -> None:
    """The recipe may compare by another one when the run is resumed."""
    standing = Standing()
    assert standing.measure(Metric("perplexity", 12.0, lower_is_better=True), loss=1.0).is_best
    assert standing.measure(Metric("accuracy", 0.5, lower_is_better=False), loss=1.0).is_best
    assert not standing.measure(Metric("accuracy", 0.5, lower_is_better=False), loss=1.0).is_best
    assert standing.measure(Metric("accuracy", 0.6, lower_is_better=True), loss=1.0).is_best


def test_a_tie_stays_one_after_a_resume() -> None:
    """The first of two equal evaluations is kept: a resumed run evaluates its last step again."""
    before = Standing()
    before.measure(Metric("accuracy", 0.9, lower_is_better=False), loss=0.1)
    resumed = Standing.of(before.as_values())
    assert not resumed.measure(Metric("accuracy", 0.9, lower_is_better=False), loss=0.1).is_best
    assert resumed.best == before.best
