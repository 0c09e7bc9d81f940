"""What the parts of a trainer share on one rank: what is trained, on what, and with which settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from launcher.checkpoint.run_state import BestEvaluation
from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.data.sources import DataSets
from launcher.data.tensors import Batches
from launcher.distributed.env import WorkerEnv
from launcher.distributed.heartbeat import Heartbeat
from launcher.engine import ExponentialMovingAverage, Stepper
from launcher.errors import DataError
from launcher.os.signals import StopSignal
from launcher.recipe.contract import Recipe
from launcher.run_dir.records import logs_of_failure, write_config
from launcher.telemetry import Telemetry
from launcher.telemetry.gpu import GpuSampler
from launcher.trainer.callback import CallbackList
from launcher.trainer.progress import StepFlag, TrainLength
from launcher.trainer.pruning import SweepStopListener
from launcher.trainer.step_reader import StepReader
from launcher.trainer.train_accuracy import TrainAccuracy


@dataclass
class TrainContext:
    """What is trained on one rank, and what callbacks find out for each other and for the loop."""

    config: Config
    env: WorkerEnv
    telemetry: Telemetry
    heartbeat: Heartbeat
    stop_signal: StopSignal
    recipe: Recipe
    data: DataSets
    data_fingerprint: Mapping[str, str]
    plan: BatchPlan  # with the micro-batch that the run uses, once that is known
    length: TrainLength
    model: nn.Module
    stepper: Stepper
    train_accuracy: TrainAccuracy
    ema: ExponentialMovingAverage | None = None  # of the weights, where ema.decay asks for one
    gpus: GpuSampler | None = None  # of this node, where they are measured
    batches: Batches = field(init=False)  # known once it is known where the run starts
    callbacks: CallbackList = field(default_factory=CallbackList)
    flags: set[StepFlag] = field(default_factory=set)  # that some rank has set, since the end of a step
    train_metrics: Mapping[str, float] = field(default_factory=dict)  # since the last evaluation
    best: BestEvaluation | None = None  # of all evaluations since the run began
    samples: float = 0.0  # trained on since the run began
    oom_message: str = ""  # what this rank has run out of, once it has abandoned a step

    def __post_init__(self) -> None:
        reads_late = self.env.device.type != "cpu" and not self.falls_back_to_fp32
        self.step_reader = StepReader(
            self.telemetry,
            self.flags,
            self.callbacks,
            self.plan,
            reads_late,
            self.heartbeat.first_step_done,  # lowers the limits of waiting
        )
        self.pruning = SweepStopListener(Path(self.config.run.dir), self.env.is_rank0)
        self._recorded = self.config

    @property
    def falls_back_to_fp32(self) -> bool:
        """Whether modules whose outputs overflow compute in fp32 from then on: precision.fp32_fallback.

        Each step must then be read before the next one.
        """
        return self.config.precision.fp32_fallback and self.stepper.policy.arithmetic.itemsize < 4

    def divide(self, shares: tuple[int, ...]) -> None:
        """Give the ranks these shares of each batch. On all ranks alike, between steps.

        Once `batches` exist, the caller also calls batches.divide(context.plan).
        """
        self.plan = dataclasses.replace(self.plan, shares=shares)
        self.stepper.set_micro_batches(self.plan.own_micro_batches)

    def should_stop(self) -> bool:
        """Whether this rank has a request to stop, by a signal or by a sweep that prunes the run."""
        return self.stop_signal.stop is not None or self.pruning.asked()

    @property
    def logs_of_failure(self) -> str:
        """The logs that a failure of this rank refers to, as the end of a sentence."""
        return logs_of_failure(Path(self.config.run.dir), self.env.rank, self.env.world_size)

    def persist_config(self, **sections: Any) -> None:
        """Write sections that the run has found out to config.yaml, on rank 0, so that a new run can start
        with them. A failure is a warning: a resume reads its checkpoint instead.
        """
        self._recorded = dataclasses.replace(self._recorded, **sections)
        if not self.env.is_rank0:
            return
        try:
            write_config(Path(self.config.run.dir), self._recorded)
        except OSError as error:
            self.telemetry.warn(f"config.yaml lacks what the run has found out: {error}")

    def report_unreadable(self, text: str, count: int) -> None:
        """Warn of `count` samples that were left out, as `text` says; DataError where these are too many."""
        limit, logs = self.config.data.max_bad_samples, "logs/rank*.log names each with its error"
        if count > limit:
            raise DataError(
                f"{text}, more than data.max_bad_samples={limit}. Correct or remove them: {logs}."
            )
        self.telemetry.warn(f"{text} and {'was' if count == 1 else 'were'} left out; {logs}.")
