"""The evaluations of a run while it trains: measured, told, and compared with those before.

Owns what becomes of an evaluation; how one is made is in `evaluate`. A collective throughout.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from launcher.config.schema import Config
from launcher.distributed.heartbeat import Heartbeat
from launcher.distributed.process_group import WorkerEnv
from launcher.engine import Stepper
from launcher.evaluation.evaluate import Evaluation, Interrupted, evaluate
from launcher.recipe import Recipe
from launcher.telemetry import Telemetry
from launcher.training.checkpointing import Measured, Standing
from launcher.training.monitor import Moment
from launcher.training.signals import Requests


@dataclass
class Measuring:
    """Measures the model on the held-out set. `latest` is the last evaluation that got to its end."""

    config: Config
    env: WorkerEnv
    recipe: Recipe
    model: nn.Module
    stepper: Stepper
    telemetry: Telemetry
    heartbeat: Heartbeat
    requests: Requests
    standing: Standing
    latest: Evaluation | None = None

    def at(self, moment: Moment) -> Measured | None:
        """Evaluate and tell of it. None, on all ranks, where one of them was asked to stop meanwhile."""
        began = time.perf_counter()
        self.stepper.buffers.average()
        share = self.config.data.batch_size // self.env.world_size
        try:
            found = evaluate(
                self.recipe,
                self.model,
                self._context,
                self.recipe.validation,
                self.env,
                self.config.data.micro_batch or max(1, share),
                interrupted=lambda: self.requests.stop is not None,
            )
        except Interrupted:
            return None
        self.latest = found
        self.telemetry.emit(
            "eval",
            moment.step,
            epoch=moment.epoch,
            loss=found.loss,
            **found.metrics,
            samples=found.samples,
            seconds=time.perf_counter() - began,
        )
        name = self.recipe.metric
        if name in found.metrics:
            return self.standing.measure(name, found.metrics[name], lower_is_better=False, loss=found.loss)
        return self.standing.measure("loss", found.loss, lower_is_better=True, loss=found.loss)

    def _context(self) -> AbstractContextManager[object]:
        self.heartbeat.beat("evaluation")  # batch by batch: a large set may take longer than a phase may
        return self.stepper.forward()
