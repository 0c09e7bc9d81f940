"""Starts wandb with restrictive settings, and ends it together with its service process.

Owns wandb's settings, its effects on environment and hooks of this process, and its service process. Imports
wandb only where it is used. Knows nothing of events.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.config.schema import TrackerConfig
from launcher.telemetry.tracker.wandb_environment import READ_HERE

if TYPE_CHECKING:
    from wandb import Settings
    from wandb.sdk.wandb_run import Run


@dataclass(frozen=True)
class WandbRun:
    """What wandb is given about a run."""

    directory: Path  # of the run, or WANDB_DIR; wandb writes to wandb/ in it
    mode: str  # online, offline
    name: str
    tracker: TrackerConfig  # project, entity, group and tags are taken from it
    config: Mapping[str, Any]
    run_id: str
    system_metrics: bool  # wandb's own sampler of processors and memory


@dataclass(frozen=True)
class Patience:
    """How long wandb may take before the run continues without it."""

    init_s: float = 10.0  # an online run that takes longer to start becomes an offline run
    finish_s: float = 30.0  # after the last event, for the remaining upload


class TrackerError(Exception):
    """wandb cannot track this run, or no longer can."""


def start(run: WandbRun, mode: str, patience: Patience, warn: Callable[[str], None]) -> Run:
    """Start wandb. Raises wandb's errors. Calls `warn` when a stop is requested on the run's page."""
    import wandb

    return wandb.init(
        dir=str(run.directory),
        mode="online" if mode == "online" else "offline",
        project=run.tracker.project,
        entity=run.tracker.entity,
        name=run.name,
        id=run.run_id,
        resume=_resume(mode),
        group=run.tracker.group,
        tags=list(run.tracker.tags),
        config=dict(run.config),
        reinit="finish_previous",
        settings=_settings(run, patience, warn),
    )


def _settings(run: WandbRun, patience: Patience, warn: Callable[[str], None]) -> Settings:
    import wandb

    return wandb.Settings(
        **_unless_in_environment(
            silent=True,  # the launcher reports what users need to know
            console="off",
            symlink=False,
            use_dot_wandb=False,
            save_code=False,
            disable_code=True,
            disable_git=True,  # a remote's URL may contain a token; env.json has the commit
            disable_job_creation=True,
        ),
        x_disable_meta=True,  # would record argv and the host
        x_disable_machine_info=True,
        x_save_requirements=False,
        x_disable_stats=not run.system_metrics,
        init_timeout=patience.init_s,
        finish_timeout=patience.finish_s,
        stop_fn=lambda: warn("a stop was requested on the run's wandb page; send SIGTERM to stop the run"),
    )


def _unless_in_environment(**ours: Any) -> dict[str, Any]:
    """The settings, without those that the user's environment sets by wandb's variables."""
    return {key: value for key, value in ours.items() if f"WANDB_{key.upper()}" not in os.environ}


def _resume(mode: str) -> Literal["allow"] | None:
    """None leaves the choice to WANDB_RESUME. Offline, a later sync merges runs with the same id."""
    return None if mode != "online" or os.environ.get("WANDB_RESUME") else "allow"


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
    hidden = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("WANDB_") and (not value or name in READ_HERE)
    }
    for name in hidden:
        del os.environ[name]
    wanted = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        os.environ.update(hidden)


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
