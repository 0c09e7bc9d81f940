"""What the parts of a run share on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from launcher.config.schema import Config
from launcher.distributed.env import WorkerEnv
from launcher.distributed.heartbeat import Heartbeat
from launcher.engine import Stepper, WeightAverage
from launcher.run_dir.records import logs_of_failure
from launcher.telemetry import Telemetry
from launcher.training.recorded_config import RecordedConfig
from launcher.training.reports import Reports
from launcher.training.requests import Requests
from launcher.training.votes import Votes


@dataclass
class Run:
    """One rank of a running job."""

    config: Config
    env: WorkerEnv
    stepper: Stepper
    telemetry: Telemetry
    heartbeat: Heartbeat
    requests: Requests
    average: WeightAverage | None = None  # of the weights, where ema.decay asks for one
    votes: Votes = field(default_factory=Votes)

    def __post_init__(self) -> None:
        self.reports = Reports(self.telemetry, self.votes)
        self.recorded = RecordedConfig(self.config, self.env.is_leader, self.telemetry.warn)

    @property
    def logs_of_failure(self) -> str:
        """The logs that a failure of this rank refers to, as the end of a sentence."""
        return logs_of_failure(Path(self.config.run.dir), self.env.rank, self.env.world_size)
