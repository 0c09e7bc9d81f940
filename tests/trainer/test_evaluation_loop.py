"""Which evaluations count as the best so far."""

from __future__ import annotations

import math

import pytest

from launcher.checkpoint.run_state import BestEvaluation, MonitoredMetric
from launcher.telemetry import Telemetry
from launcher.trainer.evaluation_loop import EvaluationLoop
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone


def evaluator_of() -> EvaluationLoop:
    return EvaluationLoop(context_alone(Telemetry(), LIMITS, 1))


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
    evaluator = evaluator_of()
    assert [
        evaluator.is_best(MonitoredMetric("metric", value, lower_is_better), 1) for value in values
    ] == best


def test_what_another_metric_has_reached_is_not_compared() -> None:
    """The recipe may compare by another one when the run is resumed."""
    evaluator = evaluator_of()
    assert evaluator.is_best(MonitoredMetric("perplexity", 12.0, lower_is_better=True), 1)
    assert evaluator.is_best(MonitoredMetric("accuracy", 0.5, lower_is_better=False), 1)
    assert not evaluator.is_best(MonitoredMetric("accuracy", 0.5, lower_is_better=False), 1)
    assert evaluator.is_best(MonitoredMetric("accuracy", 0.6, lower_is_better=True), 1)


def test_a_tie_stays_one_after_a_resume() -> None:
    """The first of two equal evaluations is kept: a resumed run evaluates its last step again."""
    before, resumed = evaluator_of(), evaluator_of()
    before.is_best(MonitoredMetric("accuracy", 0.9, lower_is_better=False), 1)
    resumed._context.best = before._context.best
    assert not resumed.is_best(MonitoredMetric("accuracy", 0.9, lower_is_better=False), 1)
    assert resumed._context.best == before._context.best == BestEvaluation("accuracy", 0.9, False, 1)
