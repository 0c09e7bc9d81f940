"""The count of evaluations without an improvement, for values of any kind."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from launcher.config.schema import EarlyStoppingConfig
from launcher.evaluation.evaluate import Evaluation
from launcher.telemetry import Telemetry
from launcher.trainer.callbacks.early_stopping import EarlyStopping
from launcher.trainer.progress import EvalOutcome, TrainLength
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone


def stops_at(values: list[float], *, higher: bool = True, **config) -> int | None:
    """The first evaluation, from 0, after which the run ends; each with a history that was saved and read."""
    rule = EarlyStoppingConfig(**{"patience": 2, "min_delta": 0.0, "metric": "score", **config})
    length = TrainLength(1, len(values) + 1, 1)
    saved: str | None = None
    for number, value in enumerate(values):
        found = Evaluation(-value, 10, {"score": value}, {"score": higher})
        for _ in range(2):  # the second time after a restart
            context = replace(context_alone(Telemetry(), LIMITS, 1), length=length)
            part = EarlyStopping(context, rule)
            if saved is not None:
                part.load_state_dict(json.loads(saved))
            part.on_eval_end(length.index_of(number + 1), EvalOutcome(evaluations={"": found}))
            saved = json.dumps(part.state_dict())
        if part.stop_reason:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "config", "expected"),
    [
        ([1, 2, 3, 4], {}, None),
        ([1, 2, 2, 2, 9], {}, 3),
        ([1, 2, 1, 3, 2, 2, 9], {}, 5),
        ([4, 3, 2, 1], {}, 2),
        ([4, 3, 2, 1], {"higher": False}, None),
        ([4, 3, 2, 1], {"metric": "val_loss"}, 2),
        ([1, 1.1, 1.2, 1.3], {"min_delta": 0.15}, None),
        ([1, 1.1, 1.2, 1.3], {"min_delta": 0.25}, 2),
        ([1, 1.1, 1.2, 1.3], {"patience": 1, "min_delta": 0.15}, 1),
        ([math.nan, math.nan, math.nan], {}, None),
        ([1, math.nan, math.nan, 2], {}, 2),
        ([math.nan, 1, 0, 0], {}, 3),
    ],
)
def test_it_stops_once_so_many_evaluations_were_no_better_than_the_best(values, config, expected) -> None:
    assert stops_at(values, **config) == expected
