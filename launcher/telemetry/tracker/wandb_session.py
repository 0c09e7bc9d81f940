"""Starts wandb with restrictive settings, and ends it together with its service process.

Owns wandb's settings, its effects on environment and hooks of this process, and its service process. Imports
wandb only where it is used. Knows nothing of events.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.telemetry.tracker.protocol import TrackedRun
from launcher.telemetry.tracker.sink import TrackerTimeouts
from launcher.telemetry.tracker.wandb_environment import hidden

if TYPE_CHECKING:
    from wandb import Settings
    from wandb.sdk.wandb_run import Run

FLUSH_S = 1.0  # until a row is in the .wandb file: wandb alone waits for 15 s or 32 kB


def start(
    run: TrackedRun,
    online: bool,
    system_metrics: bool,
    patience: TrackerTimeouts,
    warn: Callable[[str], None],
) -> Run:
    """Start wandb. Raises wandb's errors. Calls `warn` when a stop is requested on the run's page.

    `run.directory` is that of the run or WANDB_DIR: wandb writes to wandb/ in it.
    """
    import wandb

    return wandb.init(
        dir=str(run.directory),
        mode="online" if online else "offline",
        project=run.project,
        entity=run.entity,
        name=run.name,
        id=run.run_id,
        group=run.group,
        tags=list(run.tags),
        notes=run.notes,
        config=dict(run.config),
        # Otherwise a second run in this process, such as the next job of a sweep, would get the first one.
        reinit="finish_previous",
        settings=own_settings(online, system_metrics, patience, warn),
    )


def own_settings(
    online: bool, system_metrics: bool, patience: TrackerTimeouts, warn: Callable[[str], None]
) -> Settings:
    """The launcher's settings, without those that a WANDB_ variable sets or that this wandb lacks."""
    import wandb

    given = wandb.Settings()
    given.update_from_env_vars(dict(os.environ))
    ours: dict[str, Any] = {
        "silent": True,  # the launcher reports what users need to know
        "console": "off",
        "symlink": False,
        "use_dot_wandb": False,
        "save_code": False,
        "disable_code": not given.save_code,
        "disable_git": True,  # a remote's URL may contain a token; the config has the commit
        "disable_job_creation": True,
        "x_disable_meta": True,  # would record argv and the host
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "x_disable_stats": not system_metrics,
        "x_transaction_log_flush_interval": FLUSH_S,
        "init_timeout": patience.init_s,
        "finish_timeout": patience.finish_s,
        "resume": "allow" if online else None,  # offline, a later sync merges runs with the same id
    }
    allowed = wandb.Settings.model_fields.keys() - given.model_fields_set
    return wandb.Settings(
        **{key: value for key, value in ours.items() if key in allowed},
        stop_fn=lambda: warn("a stop was requested on the run's wandb page; send SIGTERM to stop the run"),
    )


def unwritten(log: Path) -> str:
    """The first record that wandb's service failed to save, from its log; "" if none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read: {error}"
    failed = next((line for line in lines if "failed to save record" in line), "")
    return failed.partition('"msg":')[2].strip('"}') if failed else ""


@contextlib.contextmanager
def quiet_environment() -> Iterator[None]:
    """Set what wandb reads only from the environment: no console output, no error reports to wandb.

    Error reports would be sent in offline runs too, and delay the exit where the server does not answer.
    Empty variables are removed, because wandb would refuse them. So are those passed to wandb as arguments,
    because the command line takes precedence over them.
    """
    names = hidden(os.environ)
    removed = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("WANDB_") and (not value or name in names)
    }
    for name in removed:
        del os.environ[name]
    wanted = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        os.environ.update(removed)


@contextlib.contextmanager
def hooks_restored() -> Iterator[None]:
    """Restore sys.exit and sys.excepthook, which wandb replaces when it starts."""
    exit_hook, except_hook = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = exit_hook, except_hook


def stop_service() -> None:
    """End wandb's service process, so that neither it nor its threads outlive the run."""
    wandb = sys.modules.get("wandb")
    if wandb is None:
        return
    process = _service_process()
    try:
        wandb.teardown()
    except Exception:  # teardown fails if the service has died
        _kill(process)


def kill_service() -> None:
    """Kill a service that does not end: the interpreter's exit would wait for it."""
    _kill(_service_process())


def _service_process() -> subprocess.Popen[bytes] | None:
    """wandb's service process. wandb has no public handle of it; None if the private one is missing."""
    try:
        from wandb.sdk import wandb_setup

        process = wandb_setup.singleton()._connection._proc._process  # type: ignore[union-attr]
    except (ImportError, AttributeError):
        return None
    return process if isinstance(process, subprocess.Popen) else None


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
