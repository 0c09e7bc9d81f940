"""trackio: a database on this machine (TRACKIO_DIR), shown with `trackio show`; its own interface is wandb's.

Reads every TRACKIO_ variable itself: with TRACKIO_SPACE_ID it logs to a Space as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.telemetry.tracker.protocol import Histogram, Media, Picture, Table, Text, TrackedRun


class TrackioTracker:
    """Implements `Tracker`. A resumed run continues under its name."""

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        import trackio

        config = {**run.config, "run_id": run.run_id, "tags": list(run.tags), "notes": run.notes}
        self._run = trackio.init(
            project=run.project,
            name=run.name,
            group=run.group,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # the `gpu` events have it, aligned to steps
        )

    def log(self, step: int, values: Mapping[str, object]) -> None:
        self._run.log(dict(values), step=step)

    def media(self, step: int, name: str, item: Media) -> None:
        import trackio

        match item:
            case Text():
                shown: object = trackio.Markdown(f"```\n{item.content}\n```")
            case Picture():
                shown = trackio.Image(item.path)
            case Histogram():
                shown = trackio.Histogram(np_histogram=(list(item.counts), list(item.edges)))
            case Table():
                shown = trackio.Table(columns=list(item.columns), data=[list(row) for row in item.rows])
            case _:
                return
        self._run.log({name: shown}, step=step)

    def finish(self, exit_code: int) -> None:
        self._run.finish()
