"""The wandb run of a training run.

Owns how values appear in wandb: axes, summaries, media. `wandb_session` owns how wandb is started and ended.
"""

from __future__ import annotations

import contextlib
import html
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import described
from launcher.telemetry.tracker.checkpoint_artifact import CheckpointArtifact
from launcher.telemetry.tracker.mode import sync_command
from launcher.telemetry.tracker.protocol import (
    ConfusionMatrix,
    Histogram,
    Media,
    Picture,
    Table,
    Text,
    TrackedRun,
)
from launcher.telemetry.tracker.rows import GROUPS
from launcher.telemetry.tracker.sink import TrackerError, TrackerTimeouts
from launcher.telemetry.tracker.wandb_session import (
    hooks_restored,
    kill_service,
    quiet_environment,
    start,
    stop_service,
    unwritten,
)

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

PREEMPTED = 75  # exit code of a PreemptedError


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

    def start(self, run: TrackedRun) -> None:
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

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._live.log({"step": step, **values})

    def media(self, step: int, name: str, item: Media) -> None:
        self._live.log({"step": step, name: _shown(item, name)})

    def finish(self, exit_code: int) -> None:
        log = Path(self._live.dir).parent / "logs" / "debug-internal.log"
        if exit_code == PREEMPTED:
            self._live.mark_preempting()
        if exit_code == 0 and (checkpoint := self._options.checkpoint()) is not None:
            self._upload(checkpoint)
        self._live.finish(exit_code=exit_code)
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
        kill_service()
        return f"; later: {sync_command(self._directory)}"

    @property
    def _live(self) -> Run:
        assert self._run is not None, "start comes first"
        return self._run

    def _started(self, run: TrackedRun) -> Run:
        options = self._options
        if options.online:
            try:
                return start(run, True, options.system_metrics, options.patience, options.warn)
            except Exception as error:  # errors of wandb, of its service and of the network
                stop_service()  # it still holds the run's id
                options.warn(
                    f"wandb could not start online ({described(error)}); it continues offline, "
                    f"later: {sync_command(run.directory)}"
                )
        return start(run, False, options.system_metrics, options.patience, options.warn)


def _shown(item: Media, name: str) -> Any:
    """The item as wandb's own kind."""
    import numpy
    import wandb

    match item:
        case Text():
            return wandb.Html(f"<pre>{html.escape(item.content)}</pre>")
        case Picture():
            return wandb.Image(item.path)
        case Histogram():
            return wandb.Histogram(np_histogram=(numpy.asarray(item.counts), numpy.asarray(item.edges)))
        case Table():
            return wandb.Table(columns=list(item.columns), data=[list(row) for row in item.rows])
        case ConfusionMatrix():
            return _confusion(item, name)


def _confusion(item: ConfusionMatrix, name: str) -> Any:
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


def new_run_id() -> str:
    """A new id in wandb's format, chosen here so that metrics.jsonl has it before wandb starts."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
