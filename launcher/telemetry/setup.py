"""Opens the telemetry of a run: the sinks on rank 0.

Owns their choice and order: files first, because they are the source of truth, then the console, then the
tracker. Other ranks use `Telemetry()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.config.schema import Config
from launcher.errors import ConfigError, StorageError
from launcher.run_dir.atomic import clear_away, read_json
from launcher.run_dir.records import ENVIRONMENT, TRACKERS, user_shape
from launcher.telemetry.console.console import Console
from launcher.telemetry.event_log import EventLog, last_run_id, recorded, recorded_before
from launcher.telemetry.status import StatusFile
from launcher.telemetry.stream import Sink, Telemetry
from launcher.telemetry.tracker.checkpoint_artifact import checkpoint_artifact
from launcher.telemetry.tracker.delivery import Delivery, path_of
from launcher.telemetry.tracker.mode import Decision, decide, sync_command
from launcher.telemetry.tracker.protocol import TrackedRun, Tracker
from launcher.telemetry.tracker.registry import make, refuse_missing
from launcher.telemetry.tracker.sink import TrackerSink, TrackerTimeouts
from launcher.telemetry.tracker.wandb_environment import taken_from
from launcher.telemetry.tracker.wandb_tracker import WandbOptions, WandbTracker, new_run_id

UPLOAD_S = 600.0  # for a checkpoint, at the end of the run
EVERY_S = 0.1  # until the events of steps are in the files


def open_telemetry(
    config: Config,
    environ: Mapping[str, str],
    with_gpu: bool,
    patience: TrackerTimeouts | None = None,
) -> Telemetry:
    """Open all sinks of a run, for rank 0, and report the tracker's mode. Raises StorageError, ConfigError.

    `with_gpu` enables wandb's sampling of system metrics, which costs processor time.
    """
    refuse_missing(config.tracker)
    run_dir = Path(config.run.dir)
    clear_away(run_dir)  # rank 0 of this attempt is the only writer
    try:
        before = recorded_before(run_dir / EventLog.name)
        files: list[Sink] = [EventLog(run_dir / EventLog.name), StatusFile(run_dir / StatusFile.name)]
        telemetry = Telemetry(files, every_s=EVERY_S)
    except OSError as error:
        raise StorageError(
            f"The run's files cannot be written to {run_dir}: {error}. Choose another place with run.dir=DIR."
        ) from error
    telemetry.add(Console(sys.stdout, sys.stderr, run_dir))
    if before.warning:
        telemetry.warn(before.warning)
    run_id = config.tracker.run_id or last_run_id(before.events) or new_run_id()
    if not config.tracker.names:
        telemetry.decision("tracker", "none: the run is recorded in its own files alone", mode="none")
    for name in config.tracker.names:
        run = _tracked_run(config, name, run_id)
        delivery = Delivery(path_of(run_dir, name), run_id, partial(recorded, run_dir / EventLog.name))
        if name == "wandb":
            _add_wandb(telemetry, config, run, delivery, environ, with_gpu, patience or TrackerTimeouts())
        else:
            telemetry.decision("tracker", f"{name} in {run.directory}", mode=name)
            _add(telemetry, config, name, partial(make, name), run, delivery, patience)
    return telemetry


def _add(
    telemetry: Telemetry,
    config: Config,
    name: str,
    make_tracker: Callable[[], Tracker],
    run: TrackedRun,
    delivery: Delivery,
    patience: TrackerTimeouts | None,
) -> None:
    facts = partial(_facts, Path(config.run.dir))
    telemetry.add(
        TrackerSink(
            name,
            make_tracker,
            run,
            telemetry.warn,
            patience,
            facts=facts,
            delivery=delivery,
            report=partial(telemetry.decision, "tracker"),
        )
    )


def _add_wandb(
    telemetry: Telemetry,
    config: Config,
    run: TrackedRun,
    delivery: Delivery,
    environ: Mapping[str, str],
    with_gpu: bool,
    patience: TrackerTimeouts,
) -> None:
    decision = decide(config.tracker, environ)
    _refuse_offline_artifacts(config, decision)
    if decision.mode == "none":
        telemetry.decision("tracker", decision.text, mode=decision.mode)
        return
    directory = Path(environ.get("WANDB_DIR") or config.run.dir).expanduser().absolute()
    run = replace(run, directory=directory)
    if given := taken_from(config.tracker, environ):
        telemetry.decision("tracker", f"takes {given}")
    telemetry.decision(
        "tracker",
        decision.text,
        mode=decision.mode,
        run_id=run.run_id,
        sync=sync_command(directory) if decision.mode == "offline" else None,
    )
    options = WandbOptions(decision.mode == "online", with_gpu, telemetry.warn, patience)
    if config.tracker.artifacts != "none":
        patience = replace(patience, finish_s=UPLOAD_S)
        chosen = partial(checkpoint_artifact, Path(config.run.dir), config.tracker.artifacts)
        options = replace(options, patience=patience, checkpoint=chosen)
    _add(telemetry, config, "wandb", partial(WandbTracker, options), run, delivery, patience)


def _refuse_offline_artifacts(config: Config, decision: Decision) -> None:
    if config.tracker.artifacts != "none" and decision.mode != "online":
        raise ConfigError(
            f"tracker.artifacts={config.tracker.artifacts}: checkpoints are uploaded by an online run only, "
            f"and wandb is {decision.text}. Log in, or set tracker.artifacts=none; the checkpoints stay in "
            f"{config.run.dir}/checkpoints."
        )


def _tracked_run(config: Config, name: str, run_id: str) -> TrackedRun:
    run_dir, tracker = Path(config.run.dir), config.tracker
    return TrackedRun(
        directory=run_dir / TRACKERS / name,
        name=tracker.run_name or f"{config.recipe.name}-{run_dir.name}",
        run_id=run_id,
        project=tracker.project,
        config=user_shape(config),
        group=tracker.group,
        tags=tracker.tags,
        notes=tracker.notes,
        entity=tracker.entity,
    )


def _facts(run_dir: Path) -> dict[str, object]:
    """The commit, read when the run starts; never the remote, whose URL may contain a token."""
    try:
        return {"git": read_json(run_dir / ENVIRONMENT).get("git")}
    except (OSError, ValueError):
        return {}
