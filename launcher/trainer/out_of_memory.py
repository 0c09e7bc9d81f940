"""What happens where a rank runs out of memory in training: all ranks end with the same OutOfMemoryError.

A rank that runs out in a forward or backward pass abandons the step, so that no other rank waits for it, and
all ranks raise when they read the step. The error has half the micro-batch, with which a parent process
restarts the run (train.on_oom=halve).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.distributed.heartbeat import describe
from launcher.errors import TO_RESUME, LauncherError, OutOfMemoryError
from launcher.os import frames
from launcher.os.oom import oom_text, to_resource_error
from launcher.run_dir.discarding import overrides_to_resume
from launcher.trainer.builders.micro_batch_finder import next_smaller
from launcher.trainer.context import TrainContext
from launcher.trainer.device import free_memory

log = logging.getLogger("launcher")


def prepare_to_abandon(context: TrainContext, error: Exception) -> bool:
    """After running out of memory, record it, free memory, and return whether all ranks can drop this step.

    False for any other error, for one after which the other ranks may have applied the step, and with
    SyncBatchNorm: the others would wait in its collectives.
    """
    shortage = oom_text(error)
    agrees = context.env.group is not None and not context.config.model.sync_bn
    if not (shortage and agrees and context.stepper.can_abandon):
        return False
    log.warning("step %d: this rank ran out of %s", context.heartbeat.latest.step, shortage, exc_info=error)
    context.oom_message = shortage
    frames.release(error)  # what the abandoned step needs must find room
    free_memory(context.env.device)
    return True


@contextmanager
def shortage_explained(context: TrainContext) -> Iterator[None]:
    """Raise an OutOfMemoryError with what to do now, for a shortage of memory within the context."""
    try:
        yield
    except Exception as error:
        found = error
        if not isinstance(error, LauncherError) and oom_text(error):
            place = f" {describe(context.heartbeat.latest)}"
            found = to_resource_error(error, f"rank {context.env.rank}", place, advice="") or error
        if not isinstance(found, OutOfMemoryError):
            raise
        raise _failure(context, str(found).strip()) from error


def _failure(context: TrainContext, text: str) -> OutOfMemoryError:
    """The error with this text, and with what a smaller micro-batch makes of the run."""
    plan = context.plan
    half = next_smaller(plan)
    text = f"{text} The micro-batch is {plan.largest_micro_batch} per rank and forward pass"
    if half is None:
        text = f"{text}, which cannot be halved: choose a smaller model or smaller samples."
        return OutOfMemoryError(text)
    text = f"{text}; data.micro_batch_size={half} needs less memory for the same update."
    halves = context.config.train.on_oom == "halve"
    if halves and not context.heartbeat.monitored_by_parent:
        again = overrides_to_resume(Path(context.config.run.dir))
        text = (
            f"{text} No parent process restarts this run with it (train.on_oom=halve). {TO_RESUME} "
            f"{again} data.micro_batch_size={half}"
        )
    failure = OutOfMemoryError(text)
    if halves:
        failure.micro_batch, failure.restart_helps = half, True
    return failure
