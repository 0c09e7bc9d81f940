"""wandb itself, kept on a short lead: how it is started, silenced, and ended for good.

Owns its settings, what it takes from and leaves in the process, and its service process. Imports wandb only
where it is used; knows nothing of events.
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
    """What wandb gets to know about a run."""

    directory: Path  # the run's, or WANDB_DIR; wandb writes to wandb/ below it
    mode: str  # online, offline
    name: str
    tracker: TrackerConfig  # project, entity, group and tags are taken from it
    config: Mapping[str, Any]
    run_id: str
    system_metrics: bool  # wandb's own sampler of processors and memory


@dataclass(frozen=True)
class Patience:
    """How long wandb may take before the run continues without it."""

    init_s: float = 10.0  # an online start that takes longer becomes an offline one
    finish_s: float = 30.0  # after the last event, for all that is still to be uploaded


class TrackerError(Exception):
    """wandb cannot take (more of) this run."""


def start(run: WandbRun, mode: str, patience: Patience, warn: Callable[[str], None]) -> Run:
    """Raises whatever wandb does. `warn` is called where a stop is requested on the run's page."""
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
            silent=True,  # we say ourselves what people need to know
            console="off",
            symlink=False,
            use_dot_wandb=False,
            save_code=False,
            disable_code=True,
            disable_git=True,  # a remote's URL may carry a token; env.json has the commit
            disable_job_creation=True,
        ),
        x_disable_meta=True,  # would record argv and the host
        x_disable_machine_info=True,
        x_save_requirements=False,
        x_disable_stats=not run.system_metrics,
        init_timeout=patience.init_s,
        finish_timeout=patience.finish_s,
        stop_fn=lambda: warn("a stop was asked for on the run's wandb page; send SIGTERM to stop the run"),
    )


def _unless_in_environment(**ours: Any) -> dict[str, Any]:
    """Our settings, but for those on which the user's environment has a variable of wandb's."""
    return {key: value for key, value in ours.items() if f"WANDB_{key.upper()}" not in os.environ}


def _resume(mode: str) -> Literal["allow"] | None:
    """None leaves it to WANDB_RESUME; offline a later sync joins what has the same id."""
    return None if mode != "online" or os.environ.get("WANDB_RESUME") else "allow"


def unwritten(log: Path) -> str:
    """The first record that wandb's service failed to save; it says so only in its own log. "" if none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read: {error}"
    failed = next((line for line in lines if "failed to save record" in line), "")
    return failed.partition('"msg":')[2].strip('"}') if failed else ""


@contextlib.contextmanager
def quiet_environment() -> Iterator[None]:
    """What wandb takes from the environment only: no chatter, and no reports of its own to its makers.

    Those reports would go out in offline runs too, and hold the exit up where the server does not answer.
    An empty variable counts as not set; wandb would refuse it. Nor does wandb read what a run is given as
    arguments, because the command line may have replaced it.
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
    """wandb replaces sys.exit and sys.excepthook at its start and never puts them back."""
    exit_hook, except_hook = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = exit_hook, except_hook


def stop_service() -> None:
    """Ends wandb's service process, so that neither it nor its threads outlive the run."""
    wandb = sys.modules.get("wandb")
    if wandb is None:
        return
    process = _service_process()
    try:
        wandb.teardown()
    except Exception:  # a service that is gone cannot be asked to go
        _kill(process)


def kill_service() -> None:
    """For a service that does not go: the interpreter's exit would wait for it."""
    _kill(_service_process())


def _service_process() -> subprocess.Popen[bytes] | None:
    """wandb's service process. It has no public handle: without one, wandb's own ways must do."""
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
