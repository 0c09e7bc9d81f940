"""The wandb run of a training run.

Owns how values appear in wandb, its settings, its effects on environment and hooks of this process, its
service process, and which checkpoint it uploads. Imports wandb only where it is used.
"""

from __future__ import annotations

import contextlib
import html
import os
import secrets
import string
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launcher.telemetry.tracker.protocol as protocol
from launcher.errors import PRUNED, PreemptedError, described
from launcher.telemetry.event_log import FILE_NAME, recorded
from launcher.telemetry.stream import Record
from launcher.telemetry.tracker.mode import sync_command
from launcher.telemetry.tracker.rows import GROUPS
from launcher.telemetry.tracker.sink import TrackerError, TrackerTimeouts
from launcher.telemetry.tracker.wandb_environment import hidden

if TYPE_CHECKING:
    from wandb import Settings
    from wandb.sdk.wandb_run import Run

STOP_REQUESTED = "a stop was requested on the run's wandb page; send SIGTERM to stop the run"
FLUSH_S = 1.0  # until a row is in the .wandb file: wandb alone waits for 15 s or 32 kB


@dataclass(frozen=True)
class CheckpointArtifact:
    """A checkpoint to be uploaded."""

    path: Path
    step: int
    is_best: bool


@dataclass(frozen=True)
class WandbOptions:
    """What only wandb has."""

    online: bool
    system_metrics: bool  # wandb's own sampler of processors and memory
    warn: Callable[[str], None]  # problems that do not end tracking
    patience: TrackerTimeouts
    checkpoint: Callable[[], CheckpointArtifact | None] = lambda: None  # to upload after a run that is done


class WandbTracker:
    """Implements `DirectedTracker` and `ServiceTracker`."""

    def __init__(self, options: WandbOptions) -> None:
        self._options = options
        self._resources = contextlib.ExitStack()
        self._directory = Path()
        self._run: Run | None = None
        self._directed: dict[str, bool] = {}

    def start(self, run: protocol.TrackedRun) -> None:
        self._directory = run.directory
        self._resources.enter_context(quiet_environment())
        with hooks_restored():
            self._run = self._started(run)
        self._run.define_metric("step", hidden=True)
        for group in GROUPS:
            self._run.define_metric(f"{group}/*", step_metric="step")

    def directions(self, higher_is_better: Mapping[str, bool]) -> None:
        """The summary of a metric is its best value, besides the last one."""
        for name, higher in higher_is_better.items():
            if self._directed.get(name) is not higher:
                self._directed[name] = higher
                best = "max" if higher else "min"
                self._live.define_metric(name, step_metric="step", summary=f"{best},last")

    def log(self, step: int, values: Mapping[str, object]) -> None:
        self._live.log({"step": step, **values})

    def media(self, step: int, name: str, item: protocol.Media) -> None:
        self._live.log({"step": step, name: _shown(item, name)})

    def finish(self, exit_code: int) -> None:
        log = Path(self._live.dir).parent / "logs" / "debug-internal.log"
        if exit_code == PreemptedError.exit_code:
            self._live.mark_preempting()
        if exit_code == 0 and (checkpoint := self._options.checkpoint()) is not None:
            self._upload(checkpoint)
        self._live.finish(exit_code=0 if exit_code == PRUNED else exit_code)  # a verdict, no failure
        if self._live.offline and (loss := unwritten(log)):
            raise TrackerError(f"could not write all of its offline run: {loss}")

    def _upload(self, checkpoint: CheckpointArtifact) -> None:
        """The files of a checkpoint, as a version of one artifact per run."""
        import wandb

        if self._options.online and self._live.offline:
            self._options.warn(f"{checkpoint.path} is not uploaded, because wandb went offline.")
            return
        metadata = {"step": checkpoint.step}
        artifact = wandb.Artifact(f"checkpoint-{self._live.id}", type="model", metadata=metadata)
        artifact.add_dir(str(checkpoint.path))
        self._live.log_artifact(artifact, aliases=["latest", *(["best"] if checkpoint.is_best else [])])

    def release(self) -> None:
        stop_service()
        self._resources.close()

    def abort(self) -> str:
        _kill(_service_process())  # the interpreter's exit would wait for one that does not end
        return f"; later: {sync_command(self._directory)}"

    @property
    def _live(self) -> Run:
        assert self._run is not None, "start comes first"
        return self._run

    def _started(self, run: protocol.TrackedRun) -> Run:
        if self._options.online:
            try:
                return _init(run, True, self._options)
            except Exception as error:  # errors of wandb, of its service and of the network
                stop_service()  # it still holds the run's id
                self._options.warn(
                    f"wandb could not start online ({described(error)}); it continues offline, "
                    f"later: {sync_command(run.directory)}"
                )
        return _init(run, False, self._options)


def _init(run: protocol.TrackedRun, online: bool, options: WandbOptions) -> Run:
    """Start wandb, which writes to wandb/ in `run.directory`. Raises wandb's errors."""
    import wandb

    # The service has a session of its own: Ctrl-C in a terminal does not reach it. A scheduler that signals
    # every process of a job ends it, and the last rows are sent by `wandb sync`.
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
        # Otherwise a second run in this process, such as the next of a sweep, would get the first one.
        reinit="finish_previous",
        settings=own_settings(online, options),
    )


def _shown(item: protocol.Media, name: str) -> object:
    """The item as wandb's own kind."""
    import numpy
    import wandb

    match item:
        case protocol.Text():
            return wandb.Html(f"<pre>{html.escape(item.content)}</pre>")
        case protocol.Picture():
            return wandb.Image(item.path)
        case protocol.Histogram():
            return wandb.Histogram(np_histogram=(numpy.asarray(item.counts), numpy.asarray(item.edges)))
        case protocol.Table():
            return wandb.Table(columns=list(item.columns), data=[list(row) for row in item.rows])
        case protocol.ConfusionMatrix():
            return _confusion(item, name)


def _confusion(item: protocol.ConfusionMatrix, name: str) -> object:
    """The chart of wandb.plot.confusion_matrix, from counts instead of one row per sample."""
    import wandb

    cells = [
        [item.classes[actual], item.classes[predicted], count]
        for actual, row in enumerate(item.counts)
        for predicted, count in enumerate(row)
    ]
    return wandb.plot_table(
        data_table=wandb.Table(columns=["Actual", "Predicted", "nPredictions"], data=cells),
        vega_spec_name="wandb/confusion_matrix/v1",
        fields={"Actual": "Actual", "Predicted": "Predicted", "nPredictions": "nPredictions"},
        string_fields={"title": name},
    )


def checkpoint_artifact(run_dir: Path, wanted: str) -> CheckpointArtifact | None:
    """The `last` or `best` checkpoint that is on the disk; None without one. Raises OSError."""
    saved = list(recorded(run_dir / FILE_NAME, lambda event: event["event"] == "checkpoint"))
    latest, best = _newest(saved), _newest([event for event in saved if event.get("best")])
    chosen = best if wanted == "best" else latest
    if chosen is None:
        return None
    return CheckpointArtifact(Path(chosen["path"]), chosen["step"], chosen is best)


def _newest(saved: Sequence[Record]) -> Record | None:
    return next((event for event in reversed(saved) if Path(event["path"]).is_dir()), None)


def own_settings(online: bool, options: WandbOptions) -> Settings:
    """The launcher's settings, without those that a WANDB_ variable sets or that this wandb lacks.

    A stop that is requested on the run's page becomes a warning.
    """
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
        "x_disable_stats": not options.system_metrics,
        "x_transaction_log_flush_interval": FLUSH_S,
        "init_timeout": options.patience.init_s,
        "finish_timeout": options.patience.finish_s,
        "resume": "allow" if online else None,  # offline, a later sync merges runs with the same id
    }
    allowed = wandb.Settings.model_fields.keys() - given.model_fields_set
    return wandb.Settings(
        **{key: value for key, value in ours.items() if key in allowed},
        stop_fn=lambda: options.warn(STOP_REQUESTED),
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


def new_run_id() -> str:
    """A new id in wandb's format, chosen here so that the run's files have it before wandb starts."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
