"""From where a run goes on, and what it leaves for those that will go on from it.

Owns the choice of the start, what is told of it, and the copy of a run's state with all that belongs to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from launcher import checkpoint
from launcher.checkpoint import HostMemory, Identity, Metric, Origin, Progress, Staged
from launcher.checkpoint.agreement import AUTO, NEVER
from launcher.checkpoint.catalog import FOLDER
from launcher.config.schema import Config
from launcher.distributed.process_group import WorkerEnv
from launcher.engine import Stepper
from launcher.engine.precision.loss_scale import ScaleStart
from launcher.errors import ConfigError
from launcher.telemetry import Telemetry
from launcher.training.checkpointing import Standing
from launcher.training.loop import Course, Start
from launcher.training.monitor import Moment, Totals


@dataclass
class Continuity:
    """A run among its checkpoints. `num_samples` is the size of the training set."""

    config: Config
    env: WorkerEnv
    stepper: Stepper
    course: Course
    telemetry: Telemetry
    num_samples: int
    standing: Standing = field(default_factory=Standing)
    totals: Totals = field(default_factory=Totals)
    scale: ScaleStart | None = None  # None where the run began afresh

    def __post_init__(self) -> None:
        self._memory = HostMemory()
        self._identity = Identity.of(self.config, self.stepper.model, self.num_samples)
        wire = self.config.wire
        form = f"{wire.dtype}, summed in {wire.sum}{', sharded' if wire.shard else ''}"
        self._origin = Origin(self.env.world_size, form)

    @property
    def directory(self) -> Path:
        """Where this run's checkpoints lie."""
        return Path(self.config.run.dir) / FOLDER

    def resume(self, restart_count: int) -> Start:
        """Take the state of the checkpoint to go on from, if there is one. A collective.

        After a restart that is always the newest of this run. Raises, on all ranks alike, ConfigError for
        another run's checkpoint or one beyond the end, StorageError where none is intact although one was
        demanded.
        """
        wish = self.config.checkpoint.resume
        if restart_count and (wish == NEVER or Path(wish).is_relative_to(self.config.run.dir)):
            wish = AUTO  # what its first start has left behind it is set aside by now
        found = checkpoint.resume(self.env, self.directory, wish, self._identity)
        for damage in found.damaged:
            self.telemetry.warn(f"a damaged checkpoint is passed over and set aside: {damage}")
        if found.snapshot is None:
            self.telemetry.rewind(0, evaluates_again=False)
            return Start()
        step = found.snapshot.progress.step
        if step > self.course.total_steps:
            raise ConfigError(
                f"{found.path} is after step {step}, but the run is to end after {self.course.total_steps}. "
                "Ask for more with train.epochs or train.max_steps, or go back with checkpoint.resume=PATH."
            )
        self.scale = checkpoint.restore(self.stepper, found.snapshot, self.env)
        self.standing = Standing.of(found.snapshot.extra)
        self.totals = Totals(found.snapshot.progress.samples, self.standing.seconds)
        evaluated = bool(found.snapshot.extra.get("evaluated", False))
        at_end = step == self.course.total_steps  # killed before its result was written
        owes = at_end or (self.course.evaluates_after(step) and not evaluated)
        self.telemetry.rewind(step, evaluates_again=owes)
        self.telemetry.emit("restart", step, path=str(found.path), attempt=restart_count)
        self.telemetry.decision("resume", f"goes on after step {step}, from {found.path}")
        there, here = found.snapshot.identity.precision, self.config.precision.name
        if there != here:
            self.telemetry.decision(
                "precision", f"{here} from here on; the checkpoint is of a run in {there}"
            )
        if not self.scale.restored:
            self.telemetry.decision("loss scale", self.scale.reason)
        return Start(step, owes)

    @property
    def has_scale(self) -> bool:
        """Whether the loss scale is that of the checkpoint from which the run goes on."""
        return self.scale is not None and self.scale.restored

    def take(self, moment: Moment, metric: Metric | None) -> Staged | None:
        """The run's state after `moment`, on rank 0; the next call overwrites it. A collective."""
        self.standing.seconds = self.totals.seconds
        progress = Progress(moment.epoch, moment.step, round(self.totals.samples))
        extra = self.standing.as_values() | {"evaluated": metric is not None}
        return checkpoint.stage(
            self.stepper, self.env, self._identity, self._origin, progress, metric, extra, self._memory
        )
