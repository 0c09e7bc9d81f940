"""A run of one process for tests of its parts: a real Stepper on a small model, a real config."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from launcher.config.schema import LossScaleConfig
from launcher.distributed.env import WorkerEnv
from launcher.distributed.heartbeat import Heartbeat
from launcher.engine import SGD, Stepper
from launcher.process.signals import StopSignal
from launcher.telemetry import Telemetry
from launcher.trainer.reports import Reports
from launcher.trainer.run import Run
from tests.configs import composed


def run_alone(telemetry: Telemetry, limits: LossScaleConfig, log_every_steps: int) -> Run:
    config = composed()
    config = replace(
        config,
        precision=replace(config.precision, loss_scale=limits),
        train=replace(config.train, log_every_steps=log_every_steps),
    )
    stepper = Stepper(nn.Linear(2, 2), SGD(lr=0.1))
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    run = Run(config, env, stepper, telemetry, Heartbeat(), StopSignal())
    run.reports = Reports(telemetry, run.votes)  # one step late, as on a GPU
    return run
