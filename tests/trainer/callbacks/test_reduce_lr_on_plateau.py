"""reduce_lr_on_plateau.factor: the rates of torch's ReduceLROnPlateau, also over a resume."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from launcher.config.schema import ReduceLROnPlateauConfig
from launcher.errors import ConfigError
from launcher.evaluation.evaluate import Evaluation
from launcher.telemetry import Telemetry
from launcher.trainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from launcher.trainer.progress import EvalOutcome, StepIndex
from tests.configs import composed
from tests.trainer.callbacks.test_step_logger import Recorder
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone


def lr_table(
    values: list[float], config: ReduceLROnPlateauConfig, higher: bool, restarts: bool
) -> list[float]:
    """The rate after each evaluation; with `restarts` each is made by a new process, and then repeated."""
    rates: list[float] = []
    part, saved = None, None
    for number, value in enumerate(values, 1):
        found = EvalOutcome(evaluations={"": Evaluation(-value, 10, {"score": value}, {"score": higher})})
        for _ in range(2 if restarts else 1):
            if part is None or restarts:
                run = context_alone(Telemetry([Recorder()]), LIMITS, 1)
                part = ReduceLROnPlateau(run, config)
                if saved is not None:
                    part.load_state_dict(json.loads(saved))
            part.on_eval_end(StepIndex(0, 0, number), found)
            saved = json.dumps(part.state_dict())
        rates.append(run.stepper.lr)
    return rates


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("higher", [False, True])
@pytest.mark.parametrize(
    ("values", "factor", "patience", "threshold"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0.1, 1, 1e-4),
        ([3.0, 2.0, 2.5, 2.1, 1.9, 2.0, 2.0, 2.0], 0.5, 0, 1e-4),
        ([1.0, 1.05, 1.1, 1.2, 1.25, 1.1, 1.0, 0.9, 0.8], 0.3, 1, 0.1),
        ([math.nan, 1.0, math.nan, math.nan, 0.5, 2.0], 0.1, 1, 1e-4),
        ([-1.0, -1.0, -2.0, -3.0, -3.0, -0.5], 0.1, 0, 1e-4),
    ],
)
def test_the_rates_are_those_of_torch(values, factor, patience, threshold, higher, restarts) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    mode = "max" if higher else "min"
    torchs = lr_scheduler.ReduceLROnPlateau(optimizer, mode, factor, patience, threshold, eps=0.0)
    expected = []
    for value in values:
        torchs.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    config = ReduceLROnPlateauConfig(factor, patience, threshold, "score")
    assert lr_table(values, config, higher, restarts) == pytest.approx(expected)


def test_a_schedule_that_sets_each_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reduce_lr_on_plateau.factor=0\.1: excludes schedule=cosine"):
        composed("reduce_lr_on_plateau.factor=0.1", "schedule=cosine")
    composed("reduce_lr_on_plateau.factor=0.1", "schedule=constant")
    context = context_alone(Telemetry(), LIMITS, 1)
    recipe: Any = SimpleNamespace(monitor=None, schedule=lambda step, total: 1.0)
    with pytest.raises(ConfigError, match="the recipe's own schedule"):
        ReduceLROnPlateau(replace(context, recipe=recipe), ReduceLROnPlateauConfig(0.1, 1, 1e-4, None))


def test_without_evaluations_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reduce_lr_on_plateau.factor=0\.1: needs evaluations, and data"):
        composed("reduce_lr_on_plateau.factor=0.1", "data.val_fraction=0", "schedule=constant")
