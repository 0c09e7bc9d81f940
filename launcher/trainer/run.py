"""What the parts of a run share on one rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config.schema import Config
from launcher.distributed.env import WorkerEnv
from launcher.distributed.heartbeat import Heartbeat
from launcher.engine import Stepper, WeightAverage
from launcher.process.signals import StopSignal
from launcher.run_dir.records import logs_of_failure, write_config
from launcher.telemetry import Telemetry
from launcher.trainer.pruning import PruneCheck
from launcher.trainer.reports import Reports
from launcher.trainer.votes import Votes


def asked(config: Config) -> dict[str, Any]:
    """The user's values of what `Run.record` may replace, by key, so that reports compare runs by them.

    Without model.init_from_sha256: weights of other content are another start.
    """
    return {
        "data.micro_batch_size": config.data.micro_batch_size,
        "precision.fp32_modules": list(config.precision.fp32_modules),
    }


@dataclass
class Run:
    """One rank of a running job."""

    config: Config
    env: WorkerEnv
    stepper: Stepper
    telemetry: Telemetry
    heartbeat: Heartbeat
    stop_signal: StopSignal
    average: WeightAverage | None = None  # of the weights, where ema.decay asks for one
    votes: Votes = field(default_factory=Votes)

    def __post_init__(self) -> None:
        reads_late = self.env.device.type != "cpu" and not self.falls_back_to_fp32
        self.reports = Reports(self.telemetry, self.votes, reads_late)
        self.pruning = PruneCheck(Path(self.config.run.dir), self.env.is_leader, self.config.sweep.prune)
        self._recorded = self.config

    @property
    def falls_back_to_fp32(self) -> bool:
        """Whether modules whose outputs overflow compute in fp32 from then on: precision.fp32_fallback.

        Each step must then be read before the next one.
        """
        return self.config.precision.fp32_fallback and self.stepper.policy.arithmetic.itemsize < 4

    def is_asked_to_end(self) -> bool:
        """Whether this rank has a request to stop, by a signal or by a sweep that prunes the run."""
        return self.stop_signal.stop is not None or self.pruning.asked()

    @property
    def logs_of_failure(self) -> str:
        """The logs that a failure of this rank refers to, as the end of a sentence."""
        return logs_of_failure(Path(self.config.run.dir), self.env.rank, self.env.world_size)

    def record(self, **sections: Any) -> None:
        """Write sections that the run has found out to config.yaml, on rank 0, so that a new run can start
        with them. A failure is a warning: a resume reads its checkpoint instead.
        """
        self._recorded = dataclasses.replace(self._recorded, **sections)
        if not self.env.is_leader:
            return
        try:
            write_config(Path(self.config.run.dir), self._recorded)
        except OSError as error:
            self.telemetry.warn(f"config.yaml lacks what the run has found out: {error}")
