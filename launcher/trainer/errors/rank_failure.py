"""How the failure of a rank is explained, recorded and passed on to the other ranks.

Owns the order in which causes are considered. The error for users is a LauncherError with the exit code.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from pathlib import Path

from launcher.config.schema import Config
from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import (
    SharedExitRecords,
    StoreExitRecords,
    failure_of_another,
    is_secondary,
)
from launcher.distributed.heartbeat import Heartbeat, describe
from launcher.engine import UnusableError, async_work
from launcher.errors import ConfigError, LauncherError, UnexpectedError, described
from launcher.os import frames
from launcher.os.oom import to_resource_error
from launcher.run_dir.records import logs_of_failure, write_failure
from launcher.run_dir.result import Failure
from launcher.telemetry import Telemetry
from launcher.telemetry.events import EndEvent
from launcher.trainer.errors.recipe_errors import IN_LOG, recipe_failure
from launcher.user_code import innermost, short_traceback, user_location

CAUSE_S = 0.4  # for the rank that was lost to record why: well within the parent's ERROR_GRACE_S

log = logging.getLogger("launcher")


def explain_and_report(
    error: BaseException,
    config: Config,
    launch: LaunchEnv,
    telemetry: Telemetry,
    heartbeat: Heartbeat,
    records: SharedExitRecords | StoreExitRecords | None,
) -> LauncherError | None:
    """Record that this rank has failed. Returns the error for users, None where it is `error` itself.

    If rank 0 has lost another rank, events and files have that one's error, once it stands in `records`.
    Frees what the frames of `error` hold. No context manager: the `__exit__` of one keeps the traceback.
    """
    note_failure(error, launch.rank, heartbeat)
    run_dir = Path(config.run.dir)
    logs = logs_of_failure(run_dir, launch.rank, launch.world_size)
    failure = to_launcher_error(error, launch, logs, describe(heartbeat.latest))
    steps = max(telemetry.step, heartbeat.latest.steps_done)  # events come every few steps only
    told: BaseException = failure or error
    if launch.rank == 0 and records is not None and is_secondary(error):
        told = failure_of_another(records, CAUSE_S) or told
    result = Failure.of(told)
    level = logging.ERROR if result.state == "failed" else logging.INFO
    log.log(level, "rank %d: %s", launch.rank, result.error)
    telemetry.emit(EndEvent(steps, state=result.state, exit=result.exit, error=result.error))
    if launch.rank == 0:
        write_failure(run_dir, result)
    free_traceback(error)
    return failure


def to_launcher_error(error: BaseException, launch: LaunchEnv, logs: str, place: str) -> LauncherError | None:
    """The error for users, caused by `error`; None where it is to be raised as it is.

    `place` is where the run is, as part of a sentence. `logs` is the end of one: the log that the full
    traceback will be in, and those of other ranks.
    """
    return (
        (ConfigError(str(error)) if isinstance(error, UnusableError) else None)
        or to_resource_error(error, f"rank {launch.rank}", f" {place}")
        # In a recipe's line that no guard covers, such as in a backward pass.
        or (recipe_failure(error, "code of the recipe", logs) if user_location(error) else None)
        or _with_log_path(error, logs)
        or _unexpected(error, logs)
    )


def _with_log_path(error: BaseException, logs: str) -> LauncherError | None:
    """The error of a sample that raised, with its logs. Where samples are read these are not known."""
    if not isinstance(error, LauncherError) or not error.traceback or IN_LOG in str(error):
        return None
    failure = type(error)(f"{str(error).rstrip().removesuffix('.')}. {IN_LOG} {logs}.")
    vars(failure).update(vars(error))  # what it says of a restart, and its traceback
    return failure


def _unexpected(error: BaseException, logs: str) -> UnexpectedError | None:
    """The error for an exception that nobody has foreseen. That of a lost rank is not the origin."""
    if not isinstance(error, Exception) or isinstance(error, LauncherError) or is_secondary(error):
        return None
    failure = UnexpectedError(f"unexpected error at {innermost(error)}: {described(error)}. {IN_LOG} {logs}.")
    failure.traceback = short_traceback(error)
    return failure


def free_traceback(error: BaseException) -> None:
    """Free what the frames of a failure hold, in particular the process group. Log its traceback before.

    Gloo closes its connections when the last reference to the group is gone, and only then do the ranks
    that wait in a collective for this one notice.
    """
    if isinstance(error, Exception):
        frames.release(error)
    else:  # the console shows the traceback of what is no Exception
        traceback.clear_frames(error.__traceback__)
    async_work.release()
    gc.collect()


def note_failure(error: BaseException, rank: int, heartbeat: Heartbeat) -> None:
    """Note when a rank failed, and write where to its log, once.

    First of all: explaining the failure drops the traceback and takes time, in which other ranks fail of this
    one, and the end of the process group may hang.
    """
    if heartbeat.failed_s is not None:
        return
    heartbeat.failed_s = time.time()
    if Failure.of(error).state == "failed":
        log.error("rank %d failed\n%s", rank, "".join(traceback.format_exception(error)))
