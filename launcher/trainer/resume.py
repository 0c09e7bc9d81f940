"""From which checkpoint a run resumes, and what is reported of it."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.checkpointer import Checkpointer
from launcher.checkpoint.run_state import Snapshot
from launcher.distributed.env import LaunchEnv
from launcher.errors import ConfigError, listed
from launcher.run_dir.differences import LENGTH_KEYS, changes, settings_of
from launcher.run_dir.discarding import resume_after
from launcher.telemetry.events import RestartEvent
from launcher.trainer.builders.data_check import check_same_data_as_checkpoint
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import ResumePoint

SHOWN = 8  # settings that have changed


def resume(context: TrainContext, checkpointer: Checkpointer, launch: LaunchEnv) -> ResumePoint:
    """Load the checkpoint to resume from, if there is one. A collective.

    As `checkpoint.resume` says. If that discards later steps of this run, it does so once: a restart of the
    same command then resumes from the run's newest checkpoint. Raises, on all ranks, ConfigError for another
    run's checkpoint or one beyond the end, StorageError if none is intact although one was requested.
    """
    telemetry, length, run_dir = context.telemetry, context.length, Path(context.config.run.dir)
    # Only rank 0's value counts: it chooses for all.
    found = checkpointer.find(
        resume_after(context.config.checkpoint.resume, run_dir, launch.restart_count > 0)
    )
    for name, problems in found.damaged.items():
        telemetry.warn(f"a damaged checkpoint is skipped and set aside: {name} ({problems})")
    if found.snapshot is None:
        telemetry.truncate_after(0, evaluates_again=False)
        if launch.micro_batch is not None:
            event = RestartEvent(0, path="", attempt=launch.restart_count, micro_batch=launch.micro_batch)
            telemetry.emit(event)
        return ResumePoint()
    step, extra = found.snapshot.progress.step, found.snapshot.extra
    if step > length.total_steps:
        raise ConfigError(
            f"{found.path} is after step {step}, but the run ends after {length.total_steps}. "
            "Raise train.epochs or train.max_steps, or resume an earlier one with checkpoint.resume=PATH."
        )
    scale = checkpointer.load(found.snapshot)
    context.best = extra.best
    context.callbacks.load_state_dict(extra.callbacks)
    # At the end: the run was killed before its result was written, so the last evaluation is repeated.
    at_end = step == length.total_steps or bool(context.callbacks.stop_reason)
    evaluation_pending = at_end or (length.should_evaluate(step) and not extra.evaluated)
    _warn_of_changes(context, found.snapshot)
    telemetry.truncate_after(step, evaluates_again=evaluation_pending)
    telemetry.emit(
        RestartEvent(step, path=str(found.path), attempt=launch.restart_count, micro_batch=launch.micro_batch)
    )
    telemetry.decision("resume", f"after step {step}, from {found.path}")
    if not scale.restored:
        telemetry.decision("loss scale", scale.reason)
    return ResumePoint(step, evaluation_pending, from_checkpoint=True, stream=extra.stream or ())


def _warn_of_changes(context: TrainContext, saved: Snapshot) -> None:
    """Report what differs from the run that saved the checkpoint. Raises DataError for other data."""
    telemetry, config = context.telemetry, context.config
    allowed = config.checkpoint.allow_other_data
    if text := check_same_data_as_checkpoint(saved.extra.data, context.data_fingerprint, allowed):
        telemetry.warn(text)
    others = changes(saved.extra.settings, settings_of(config))
    lengths = [others.pop(key) for key in LENGTH_KEYS if key in others]
    texts = list(others.values())
    if lengths and (context.recipe.schedule is not None or config.schedule.name != "constant"):
        spread = "the schedule is spread over the new length, so the learning rate jumps"
        texts.insert(0, f"{' and '.join(lengths)}: {spread}")
    if texts:
        text = listed(texts, SHOWN, "; ")
        telemetry.warn(f"resumed with other settings than the checkpoint's: {text}")
    if context.ema is not None and saved.average is None:
        text = f"starts from the weights after step {saved.progress.step}: the checkpoint has none"
        telemetry.decision("ema", text)
