"""From which checkpoint a run resumes, and what it saves for the next one.

Owns the choice of the start, its report, and the copy of everything in a run's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.checkpoint.async_writer import SaveResult
from launcher.checkpoint.catalog import FOLDER
from launcher.checkpoint.checkpointer import Checkpointer
from launcher.checkpoint.run_state import (
    MonitoredMetric,
    RunExtras,
    RunIdentity,
    Snapshot,
    TrainProgress,
)
from launcher.data.iterable_loader import IterableData
from launcher.distributed.collectives import all_gather_str
from launcher.distributed.env import LaunchEnv
from launcher.engine.precision.loss_scale import ScaleStart
from launcher.errors import ConfigError, listed
from launcher.run_dir.differences import changed_settings, settings_of
from launcher.run_dir.discarding import resume_after
from launcher.telemetry.events import RestartEvent
from launcher.trainer.builders.data_check import check_same_data_as_checkpoint
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import Position, ResumePoint

SHOWN = 8  # settings that have changed


class RunCheckpoints:
    """Resumes and saves the run of a job."""

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        self.scale: ScaleStart | None = None  # None if the run did not resume
        self.stream: Sequence[str] = ()  # by rank: where it stood in a stream when the checkpoint was taken
        num_samples = 0 if isinstance(context.data.train, IterableData) else context.plan.num_samples
        identity = RunIdentity.of(self._context.config, self._context.stepper.model, num_samples)
        self.checkpointer = Checkpointer(
            Path(self._context.config.run.dir) / FOLDER,
            self._context.config.checkpoint.keep,
            self._context.env,
            self._context.stepper,
            self._context.ema,
            identity,
        )
        # Once: it takes 1 ms, for which each checkpoint would wait.
        self._settings = settings_of(context.config)

    def resume(self, launch: LaunchEnv) -> ResumePoint:
        """Load the checkpoint to resume from, if there is one. A collective.

        After a restart that is the newest of this run, once later steps than those of `checkpoint.resume` are
        set aside. Raises, on all ranks, ConfigError for another run's checkpoint or one beyond the end,
        StorageError if none is intact although one was requested.
        """
        resume_from, run_dir = self._context.config.checkpoint.resume, Path(self._context.config.run.dir)
        # Only rank 0's value counts: it chooses for all.
        found = self.checkpointer.find(resume_after(resume_from, run_dir, launch.restart_count > 0))
        for name, problems in found.damaged.items():
            self._context.telemetry.warn(
                f"a damaged checkpoint is skipped and set aside: {name} ({problems})"
            )
        if found.snapshot is None:
            self._context.telemetry.truncate_after(0, evaluates_again=False)
            if launch.halved is not None:
                event = RestartEvent(0, path="", attempt=launch.restart_count, micro_batch=launch.halved)
                self._context.telemetry.emit(event)
            return ResumePoint()
        step = found.snapshot.progress.step
        length = self._context.length
        if step > length.total_steps:
            raise ConfigError(
                f"{found.path} is after step {step}, but the run ends after {length.total_steps}. "
                "Raise train.epochs or train.max_steps, or resume an earlier one with checkpoint.resume=PATH."
            )
        self.scale = self.checkpointer.load(found.snapshot)
        extra = found.snapshot.extra
        self._context.best = extra.best
        self._context.callbacks.load_state_dict(extra.callbacks)
        self.stream = extra.stream or ()
        # Killed before its result was written, or to be saved again with the evaluation that is due.
        at_end = step == length.total_steps or bool(self._context.callbacks.stop_reason)
        start = ResumePoint(step, at_end or (length.should_evaluate(step) and not extra.evaluated))
        self._report(found.snapshot, found.path, start, launch)
        return start

    def _report(self, saved: Snapshot, path: Path | None, start: ResumePoint, launch: LaunchEnv) -> None:
        """Report where the run resumes, and what has changed."""
        telemetry = self._context.telemetry
        allowed = self._context.config.checkpoint.allow_other_data
        if text := check_same_data_as_checkpoint(saved.extra.data, self._context.data_fingerprint, allowed):
            telemetry.warn(text)
        if others := changed_settings(saved.extra.settings, self._settings):
            text = listed(others, SHOWN, "; ")
            telemetry.warn(f"resumed with other settings than the checkpoint's: {text}")
        telemetry.truncate_after(start.step, evaluates_again=start.evaluation_pending)
        telemetry.emit(
            RestartEvent(start.step, path=str(path), attempt=launch.restart_count, micro_batch=launch.halved)
        )
        telemetry.decision("resume", f"after step {start.step}, from {path}")
        if self._context.ema is not None and saved.average is None:
            text = f"starts from the weights after step {start.step}: the checkpoint has none"
            telemetry.decision("ema", text)
        if self.scale is not None and not self.scale.restored:
            telemetry.decision("loss scale", self.scale.reason)

    @property
    def resumed(self) -> bool:
        """Whether the run has started from a checkpoint."""
        return self.scale is not None

    def save(self, position: Position, metric: MonitoredMetric | None) -> SaveResult | None:
        """Save the run's state after `position`, as `Checkpointer.save`. A collective."""
        states, place = self._context.callbacks.state_dict(), self._context.batches.position()
        progress = TrainProgress(position.epoch, position.step, round(self._context.samples))
        extra = RunExtras(
            states,
            best=self._context.best,
            evaluated=metric is not None,
            data=self._context.data_fingerprint,
            settings=self._settings,
            stream=all_gather_str(self._context.env, place) if place else None,
        )
        return self.checkpointer.save(progress, metric, extra)
