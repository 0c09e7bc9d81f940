"""Runs one job: on workers that this process starts, or on the ranks started with it.

Owns the printing of what ended a job and its exit code. Imports no torch until a job runs in this process.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.arguments import Arguments
from launcher.config.messages import command_name
from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import JobFailed
from launcher.errors import (
    ON_REQUEST,
    PRUNED,
    STOPPED,
    TO_RESUME,
    ConfigError,
    LauncherError,
    PreemptedError,
    escaped,
)
from launcher.launch.config_broadcast import ConfigBroadcast
from launcher.launch.worker_count import num_workers
from launcher.os.oom import to_resource_error
from launcher.os.stdio import say, write
from launcher.run_dir.records import write_failure
from launcher.run_dir.result import Failure
from launcher.run_dir.status import FILE_NAME as STATUS
from launcher.run_dir.status import mark_ended, state_since

if TYPE_CHECKING:
    import torch.distributed as dist

    from launcher.config.schema import Config


def run_job(config: Config, overrides: Sequence[str], broadcast: ConfigBroadcast) -> None:
    """Run a job: in parent mode on new workers, else on the ranks started with this process."""
    from launcher.launch.parent import run_supervised
    from launcher.run_dir.claim import open_run_dir

    workers = num_workers(config.launch, broadcast.launch)
    with open_run_dir(broadcast.with_saved_run_dir(config), overrides) as (config, finished):
        if finished:
            status = Path(config.run.dir) / STATUS
            if state_since(status, 0) != "done":  # killed after its result was written
                mark_ended(status, "done", 0)
            say(finished, sys.stdout)
        elif workers is None or broadcast.launch.is_node:
            broadcast.save_run_dir(config)
            try:
                broadcast.run(config)
            except JobFailed as error:
                # Rank 0 may have written only that it lost a connection.
                if error.exit_code not in ON_REQUEST:
                    write_failure(Path(config.run.dir), Failure.of(error))
                raise
        else:
            run_supervised(config, workers)


def run_sweep_job(arguments: Arguments, broadcast: ConfigBroadcast) -> int:
    """job DIR: runs or resumes one job of a sweep, from its folder

    Runs or resumes one job of a sweep, and records its end in sweep.json. The config is that in DIR/job.json,
    which the sweep wrote; later changes of the files in conf/ have no effect. The exit code is that of the
    run.

    Example: {program} job multirun/resnet18/20260101-120000-ab12/3_optim.lr=0.1
    """
    from launcher.sweep.state import record_job

    if len(arguments.positionals) != 1:
        raise ConfigError(
            f"job: give the folder of one job: {command_name()} job multirun/<recipe>/<sweep>/<job>"
        )
    directory = Path(arguments.positionals[0])
    try:
        return run_in(directory, broadcast, "To resume: the same command.")
    finally:
        with suppress(OSError):
            record_job(directory.absolute())


def run_in(directory: Path, broadcast: ConfigBroadcast, again: str = "") -> int:
    """Run the job of a folder, and report its failure; returns its exit code.

    `again` says how to resume, in place of the words of a run, which name run.dir.
    """
    from launcher.sweep.state import read_job

    try:
        config, overrides = read_job(directory)
        run_job(config, overrides, broadcast)
    except Exception as error:
        if isinstance(error, LauncherError) and error.exit_code in STOPPED:
            error.args = (f"{str(error).partition(f' {TO_RESUME}')[0]} {again}".rstrip(),)
        return report_failure(error)
    return 0


def run_worker(config: Config, launch: LaunchEnv, store: dist.Store | None, job: str) -> None:
    from launcher import worker

    worker.run(config, launch, store, job)


def run_node(config: Config, launch: LaunchEnv, store: dist.Store | None, job: str) -> None:
    """Run the workers of this machine, as one of the parents of a run on several machines."""
    from launcher.launch.multi_node import MultiNode
    from launcher.launch.parent import run_supervised

    assert store is not None
    run_supervised(
        config, num_workers(config.launch, LaunchEnv()) or 1, MultiNode(launch, store, job, config.launch)
    )


def report_failure(error: Exception) -> int:
    """Print the error, after the traceback of what it does not explain; returns the exit code."""
    error = to_resource_error(error, "this process") or error
    if isinstance(error, LauncherError):
        if error.exit_code in STOPPED:  # a further Ctrl-C would replace the exit code, or end in a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        kind = {PreemptedError.exit_code: "stopped", PRUNED: "pruned"}.get(error.exit_code, "error")
        write(f"{error.traceback}{escaped(f'{kind}: {error}')}\n", sys.stderr)
        return error.exit_code
    write(escaped("".join(traceback.format_exception(error))), sys.stderr)
    return 1
