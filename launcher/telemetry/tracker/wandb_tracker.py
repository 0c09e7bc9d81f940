"""The wandb run of a training run.

Owns how values appear in wandb. wandb has the settings that it has in any
script, and starts and ends its own process. Imports wandb only where it is used.
"""

from __future__ import annotations

import html
import os
import secrets
import string
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import launcher.telemetry.tracker.protocol as protocol
from launcher.errors import PRUNED, PreemptedError, described
from launcher.telemetry.tracker.mode import sync_command
from launcher.telemetry.tracker.rows import GROUPS
from launcher.telemetry.tracker.sink import TrackerTimeouts

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

# Variables of wandb, unless they are set: the launcher prints what users need to know, and reports of errors
# in wandb itself, which offline runs would send too, delay the end of a run without a network.
DEFAULTS = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


class WandbTracker:
    """Implements `Tracker`. `warn` receives problems that do not end tracking."""

    def __init__(self, online: bool, warn: Callable[[str], None], timeouts: TrackerTimeouts) -> None:
        self._online, self._warn, self._timeouts = online, warn, timeouts
        self._run: Run | None = None

    def start(self, run: protocol.RunInfo) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        self._run = self._started(run)
        self._run.define_metric("step", hidden=True)
        for group in GROUPS:
            self._run.define_metric(f"{group}/*", step_metric="step")

    def log(self, step: int, values: Mapping[str, object]) -> None:
        self._live.log({"step": step, **values})

    def media(self, step: int, name: str, item: protocol.Media) -> None:
        self._live.log({"step": step, name: _shown(item, name)})

    def finish(self, exit_code: int) -> None:
        if exit_code == PreemptedError.exit_code:
            self._live.mark_preempting()
        self._live.finish(exit_code=0 if exit_code == PRUNED else exit_code)  # a verdict, no failure

    @property
    def _live(self) -> Run:
        assert self._run is not None, "start comes first"
        return self._run

    def _started(self, run: protocol.RunInfo) -> Run:
        import wandb

        if self._online:
            try:
                return _init(run, True, self._timeouts)
            except Exception as error:  # errors of wandb, of its service and of the network
                wandb.teardown()  # its service would refuse the id of the run that it began
                self._warn(
                    f"wandb could not start online ({described(error)}); it continues offline, "
                    f"later: {sync_command(run.directory)}"
                )
        return _init(run, False, self._timeouts)


def _init(run: protocol.RunInfo, online: bool, timeouts: TrackerTimeouts) -> Run:
    """Start wandb, which writes to wandb/ in `run.directory`. Raises wandb's errors."""
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
        # Otherwise a second run in this process, such as the next of a sweep, would get the first one.
        reinit="finish_previous",
        resume="allow" if online else None,  # offline, `wandb sync` merges the files of one id
        settings=wandb.Settings(init_timeout=timeouts.init_s, finish_timeout=timeouts.finish_s),
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


def new_run_id() -> str:
    """A new id in wandb's format, chosen here so that the run's files have it before wandb starts."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
