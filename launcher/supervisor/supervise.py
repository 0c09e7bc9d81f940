"""One supervised run, from a checked config to its files and its verdict.

Owns the warm process: torch and the worker's code are imported once, here, and every worker of every run is
forked from it. It never touches a device and runs no user code. Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import tempfile
import threading
from pathlib import Path

from launcher.config.schema import Config
from launcher.distributed.heartbeat import Heartbeats
from launcher.errors import LauncherError, PreemptedError
from launcher.process.lifetime import adopting
from launcher.run_dir.records import write_result
from launcher.run_dir.status import FILE_NAME, mark_failed
from launcher.supervisor.root_cause import RunFailed, Verdict
from launcher.supervisor.signals import Signals, heeded, held_back


def supervise(config: Config, num_workers: int) -> None:
    """Run one job on so many workers of this machine; returns when it is done.

    Raises PreemptedError where the run was stopped and saved, NoProgressError where it crashes again and
    again, and RunFailed with the failure's own exit code otherwise; `status.json` and `result.json` say the
    same. To be called from the main thread, whose end ends the workers.
    """
    assert threading.current_thread() is threading.main_thread()
    heartbeats = Heartbeats(num_workers)
    try:
        with heeded() as signals, adopting():
            _supervise(config, num_workers, signals, heartbeats)
    except Exception as error:
        if not isinstance(error, PreemptedError):  # then the leader has written it, with the checkpoint
            write_down(Path(config.run.dir), error, heartbeats.steps_done())
        raise


def _supervise(config: Config, num_workers: int, signals: Signals, heartbeats: Heartbeats) -> None:
    with held_back():  # in the threads of libraries for good: only this one shall be interrupted
        warm_up()
    from launcher.supervisor.agent import Agent
    from launcher.supervisor.child import Work

    if signals.stop is not None:
        raise RunFailed(
            Verdict(128 + signals.stop, f"stopped by {signals.stop.name} before the workers started")
        )
    with tempfile.TemporaryDirectory(prefix="launcher-", ignore_cleanup_errors=True) as folder:
        work = Work(config, heartbeats, Path(folder), os.getpid(), signals.obeyed)
        Agent(work, num_workers, signals).run()


def warm_up() -> None:
    """Import what every worker needs. The tracker is the leader's alone, and imported there.

    Nothing imported becomes garbage: not looking for any saves a fifth of the time, and what is frozen the
    collectors of the workers leave alone, so that its memory stays shared.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    importlib.import_module("launcher.supervisor.agent")
    gc.freeze()
    if was_enabled:
        gc.enable()


def write_down(run_dir: Path, error: Exception, steps_done: int = 0) -> None:
    """The verdict in the run's files: its leader may have been killed, or blame who was not to blame."""
    exit_code = error.exit_code if isinstance(error, LauncherError) else 1
    with contextlib.suppress(OSError):
        write_result(run_dir, {"state": "failed", "exit": exit_code, "error": str(error) or repr(error)})
        mark_failed(run_dir / FILE_NAME, exit_code, steps_done)
