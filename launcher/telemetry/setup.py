"""Opens the telemetry of a run: the sinks on rank 0.

Owns their choice and order: files first, because they are the source of truth, then the console, then the
trackers. Other ranks use `Telemetry()`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from launcher.config.schema import Config, to_dict
from launcher.errors import StorageError
from launcher.run_dir.atomic import clear_away
from launcher.run_dir.records import TRACKERS
from launcher.telemetry.console.console import Console
from launcher.telemetry.event_log import EventLog
from launcher.telemetry.status import StatusFile
from launcher.telemetry.stream import Sink, Telemetry
from launcher.telemetry.tracker.mode import decide, sync_command
from launcher.telemetry.tracker.protocol import RunInfo, Tracker
from launcher.telemetry.tracker.registry import make, refuse_missing
from launcher.telemetry.tracker.run_id import save_run_id, saved_run_id
from launcher.telemetry.tracker.sink import TrackerSink, TrackerTimeouts
from launcher.telemetry.tracker.wandb_tracker import WandbTracker, new_run_id

EVERY_S = 0.1  # until the events of steps are in the files: what a killed process may lose


def open_telemetry(
    config: Config,
    environ: Mapping[str, str],
    timeouts: TrackerTimeouts | None = None,
) -> Telemetry:
    """Open all sinks of a run, for rank 0. Raises StorageError, ConfigError."""
    refuse_missing(config.tracker)
    run_dir = Path(config.run.dir)
    clear_away(run_dir)  # rank 0 of this attempt is the only writer
    try:
        files: list[Sink] = [EventLog(run_dir / EventLog.name), StatusFile(run_dir / StatusFile.name)]
        telemetry = Telemetry(files, every_s=EVERY_S)
    except OSError as error:
        raise StorageError(
            f"The run's files cannot be written to {run_dir}: {error}. Choose another place with run.dir=DIR."
        ) from error
    telemetry.add(Console(sys.stdout, sys.stderr, run_dir))
    run_id = config.tracker.run_id or saved_run_id(run_dir) or new_run_id()
    if not config.tracker.names:
        telemetry.decision("tracker", "none: events are written only to the files of the run", mode="none")
    timeouts = timeouts or TrackerTimeouts()
    for name in config.tracker.names:
        run = _tracked_run(config, name, run_id, environ)
        make_tracker: Callable[[], Tracker] = partial(make, name)
        if name != "wandb":
            where = f" in {run.directory}" if name == "tensorboard" else ""  # others may write elsewhere
            telemetry.decision("tracker", name + where, mode=name)
        else:
            mode = _wandb_mode(telemetry, config, run, environ)
            if mode == "none":
                continue
            make_tracker = partial(WandbTracker, mode == "online", telemetry.warn, timeouts)
        save_run_id(run_dir, run_id)
        telemetry.add(TrackerSink(name, make_tracker, run, telemetry.warn, timeouts))
    return telemetry


def _wandb_mode(telemetry: Telemetry, config: Config, run: RunInfo, environ: Mapping[str, str]) -> str:
    """The mode of wandb, which is reported with its reason."""
    decision = decide(config.tracker, environ)
    facts: dict[str, object] = {}
    if decision.mode != "none":
        sync = sync_command(run.directory) if decision.mode == "offline" else None
        facts = {"run_id": run.run_id, "sync": sync}
    telemetry.decision("tracker", decision.text, mode=decision.mode, **facts)
    return decision.mode


def _tracked_run(config: Config, name: str, run_id: str, environ: Mapping[str, str]) -> RunInfo:
    run_dir, tracker = Path(config.run.dir), config.tracker
    of_wandb = Path(os.path.expanduser(environ.get("WANDB_DIR") or run_dir)).absolute()
    return RunInfo(
        directory=of_wandb if name == "wandb" else run_dir / TRACKERS / name,
        name=tracker.run_name or f"{config.recipe.name}-{run_dir.name}",
        run_id=run_id,
        project=tracker.project,
        config=to_dict(config),
        group=tracker.group,
        tags=tracker.tags,
        notes=tracker.notes,
        entity=tracker.entity,
    )
