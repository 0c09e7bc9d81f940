"""Opens the telemetry of a run: the sinks on rank 0.

Owns their choice and order: files first, because they are the source of truth, then the console, then the
tracker. Other ranks use `Telemetry()`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.config.schema import Config
from launcher.errors import StorageError
from launcher.run_dir.atomic import clear_away
from launcher.run_dir.records import user_shape
from launcher.telemetry.console.console import Console
from launcher.telemetry.events import EventLog, last_run_id, recording_of
from launcher.telemetry.status import StatusFile
from launcher.telemetry.stream import Telemetry
from launcher.telemetry.tracker.mode import Decision, decide
from launcher.telemetry.tracker.wandb_environment import taken_from
from launcher.telemetry.tracker.wandb_session import Patience, WandbRun
from launcher.telemetry.tracker.wandb_sink import WandbSink, new_run_id, sync_command


def open_telemetry(
    config: Config,
    environ: Mapping[str, str],
    with_gpu: bool,
    patience: Patience | None = None,
) -> Telemetry:
    """Open all sinks of a run, for rank 0, and report the tracker's mode. Raises StorageError.

    `with_gpu` enables wandb's sampling of system metrics, which costs processor time.
    """
    run_dir = Path(config.run.dir)
    clear_away(run_dir)  # rank 0 of this attempt is the only writer
    try:
        before = recording_of(run_dir)
        telemetry = Telemetry([EventLog(run_dir / EventLog.name), StatusFile(run_dir / StatusFile.name)])
    except OSError as error:
        raise StorageError(
            f"The run's files cannot be written to {run_dir}: {error}. Choose another place with run.dir=DIR."
        ) from error
    telemetry.add(Console(sys.stdout, sys.stderr, run_dir))
    if before.warning:
        telemetry.warn(before.warning)
    run_id = config.tracker.run_id or last_run_id(before.events) or new_run_id()
    decision = decide(config.tracker, environ)
    if decision.mode == "none":
        telemetry.decision("tracker", decision.text, mode=decision.mode)
        return telemetry
    run = _wandb_run(config, decision, run_id, with_gpu, environ)
    if given := taken_from(config.tracker, environ):
        telemetry.decision("tracker", f"takes {given}")
    telemetry.decision(
        "tracker",
        decision.text,
        mode=decision.mode,
        run_id=run.run_id,
        sync=sync_command(run.directory) if decision.mode == "offline" else None,
    )
    telemetry.add(WandbSink(run, telemetry.warn, patience))
    return telemetry


def _wandb_run(
    config: Config, decision: Decision, run_id: str, with_gpu: bool, environ: Mapping[str, str]
) -> WandbRun:
    run_dir = Path(config.run.dir)
    return WandbRun(
        directory=Path(environ.get("WANDB_DIR") or run_dir).expanduser().absolute(),
        mode=decision.mode,
        name=config.tracker.run_name or f"{config.recipe.name}-{run_dir.name}",
        tracker=config.tracker,
        config=user_shape(config),
        run_id=run_id,
        system_metrics=with_gpu,
    )
