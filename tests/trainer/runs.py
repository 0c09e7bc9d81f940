"""A run of one process for tests of its parts: a real Stepper on a small model, a real config."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from launcher.config.schema import LossScaleConfig
from launcher.data.batch_plan import BatchPlan
from launcher.distributed.env import WorkerEnv
from launcher.distributed.heartbeat import Heartbeat
from launcher.engine import SGD, Stepper
from launcher.os.signals import StopSignal
from launcher.telemetry import Telemetry
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import TrainLength
from launcher.trainer.step_reader import StepReader
from tests.configs import composed

PLAN = BatchPlan(8 * 100 - 3, 8, None, 1, 0, 0, drop_last=False)  # the last step of an epoch has 5 samples


def context_alone(telemetry: Telemetry, limits: LossScaleConfig, log_every_steps: int) -> TrainContext:
    config = composed()
    config = replace(
        config,
        precision=replace(config.precision, loss_scale=limits),
        train=replace(config.train, log_every_steps=log_every_steps),
    )
    model = nn.Linear(2, 2)
    context = TrainContext(
        config,
        env=WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None),
        telemetry=telemetry,
        heartbeat=Heartbeat(),
        stop_signal=StopSignal(),
        recipe=cast(Any, SimpleNamespace(monitor=None, schedule=None)),
        data=cast(Any, SimpleNamespace(validation={})),
        data_fingerprint={},
        plan=PLAN,
        length=TrainLength(100, 100, 1),
        model=model,
        stepper=Stepper(model, SGD(lr=0.1)),
        train_accuracy=cast(Any, None),
    )
    # One step late, as on a GPU.
    context.step_reader = StepReader(telemetry, context.flags, context.callbacks, PLAN)
    return context
