"""What a tracker is: four methods, called from one thread that is never the training's.

Owns the values that are passed to it. Public: a tracker of one's own implements `Tracker` and registers with
`@tracker("name")` (`launcher.telemetry.tracker.registry`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is given about a run."""

    directory: Path  # for files of this tracker; it exists
    name: str
    run_id: str  # kept when the run resumes
    project: str
    config: Mapping[str, Any]  # nested, as config.yaml has it
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    entity: str | None = None


@dataclass(frozen=True)
class Text:
    """A text to be shown as it is, line by line."""

    content: str


@dataclass(frozen=True)
class Picture:
    """The file of a picture (PNG)."""

    path: str


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` values lie from `edges[i]` to `edges[i + 1]`."""

    counts: Sequence[float]
    edges: Sequence[float]


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class ConfusionMatrix:
    """`counts[i][j]` samples of class `classes[i]` were predicted as `classes[j]`."""

    classes: Sequence[str]
    counts: Sequence[Sequence[int]]


Media = Text | Picture | Histogram | Table | ConfusionMatrix


class Tracker(Protocol):
    """Records one run. If a method raises, the tracker is given up with a warning; the run continues."""

    def start(self, run: RunInfo) -> None:
        """Called once, before the first `log`."""

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Numbers and short strings by name (train/loss, ...). A step may come more than once."""

    def media(self, step: int, name: str, item: Media) -> None:
        """One item; ignore the kinds that the tracker cannot show."""

    def finish(self, exit_code: int) -> None:
        """Called once, with the exit code of the run. Anything buffered must be written now."""
