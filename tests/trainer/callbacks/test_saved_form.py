"""The form in which parts save their state is that of earlier checkpoints."""

from __future__ import annotations

import json

import pytest

from launcher.config.schema import ReduceLROnPlateauConfig
from launcher.telemetry import Telemetry
from launcher.trainer.callbacks.micro_batch import MicroBatch
from launcher.trainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from tests.trainer.callbacks.test_step_logger import Recorder
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone


@pytest.mark.parametrize("best", [None, ["score", 1.0, True]])
def test_a_plateau_continues_from_an_earlier_checkpoint(best) -> None:
    saved = {"share": 0.5, "best": best, "bad": 1, "step": 3}
    run = context_alone(Telemetry([Recorder()]), LIMITS, 1)
    part = ReduceLROnPlateau(run, ReduceLROnPlateauConfig(0.5, 1, 1e-4, None))
    part.load_state_dict(saved)
    assert json.loads(json.dumps(part.state_dict())) == saved


@pytest.mark.parametrize("chosen", [None, {"wish": "auto", "size": 4}])
def test_a_micro_batch_found_continues_from_an_earlier_checkpoint(chosen) -> None:
    part = MicroBatch(context_alone(Telemetry([Recorder()]), LIMITS, 1))
    part.load_state_dict({"micro_batch": chosen})
    assert json.loads(json.dumps(part.state_dict())) == {"micro_batch": chosen}
