"""Which checkpoint of a run a tracker uploads at the end, if it was asked to.

Reads metrics.jsonl, which knows the checkpoints of all attempts of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.telemetry.event_log import FILE_NAME, recorded
from launcher.telemetry.stream import Record


@dataclass(frozen=True)
class CheckpointArtifact:
    """A checkpoint to be uploaded."""

    path: Path
    step: int
    is_best: bool


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
