"""One supervised run, from a checked config to its files and result.

Owns the warm process: torch and the worker's code are imported once, here, and every worker of every run is
forked from it. It never touches a device and runs no user code. Importing this module imports no torch.
"""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.config.schema import Config
from launcher.distributed.heartbeat import Heartbeats
from launcher.errors import ON_REQUEST, LauncherError
from launcher.launch.multi_node import SingleNode
from launcher.os.signals import (
    StopSignal,
    handled_signals,
    save_means_stop,
    signal_handlers_installed,
    signals_blocked,
)
from launcher.run_dir.records import write_failure
from launcher.run_dir.result import ENDS_ON_REQUEST, Failure
from launcher.run_dir.status import FILE_NAME, state_since


def run_supervised(config: Config, num_workers: int, nodes: SingleNode | None = None) -> None:
    """Run one job on so many workers of this machine, one of `nodes`; returns when it is done.

    Raises a LauncherError with exit code 75 if the run was stopped and saved (PreemptedError, or JobFailed
    when rank 0 died after saving), NoProgressError if it crashes repeatedly, and JobFailed with the failure's
    exit code otherwise; `status.json` and `result.json` record the same. Call it from the main thread, whose
    end kills the workers.
    """
    assert threading.current_thread() is threading.main_thread()
    heartbeats, nodes = Heartbeats(num_workers), nodes or SingleNode()
    handled, began = handled_signals(), time.time()
    signals = StopSignal(save_means_stop(config.launch.preempt_signals))
    try:
        with signal_handlers_installed(signals):
            with signals_blocked():  # threads of libraries keep them blocked: only this thread is interrupted
                preload()
            from launcher.launch.agent import Agent
            from launcher.launch.worker_process import WorkerSpec

            # A file without a name, in memory: other users cannot open it, no full disk can cut its records
            # short, and it is gone with the processes.
            with open(os.memfd_create("launcher-store"), "rb") as store, nodes:
                nodes.raise_if_stopped(signals)
                work = WorkerSpec(config, heartbeats, os.getpid(), handled, store.fileno())
                Agent(work, num_workers, signals, nodes).run()
    except Exception as error:
        # If rank 0 has written that it stopped, keep its result.json. Otherwise write ours: rank 0 may have
        # been killed, or have named the wrong cause.
        on_request = isinstance(error, LauncherError) and error.exit_code in ON_REQUEST
        said_so = state_since(Path(config.run.dir) / FILE_NAME, began) in ENDS_ON_REQUEST
        if nodes.is_node0 and not (on_request and said_so):
            write_failure(Path(config.run.dir), Failure.of(error), heartbeats.steps_done())
        raise


def preload(more: Sequence[str] = ()) -> None:
    """Import torch and all modules that workers use, and `more`, before forking.

    The garbage collector is off meanwhile (a fifth faster), and the objects are frozen: forks share their
    memory. The tracker is left to rank 0, which alone uses it.
    """
    gc.disable()
    for name in ("launcher.launch.agent", *more):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
