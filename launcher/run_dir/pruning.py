"""The file by which a sweep asks one of its jobs to end: it works for any job whose directory both can reach.

Owns the file's name and content. The job finds the file by itself, so no process, port or scheduler is needed
between the two. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.run_dir.atomic import read_json, write_json

PRUNE = "prune.json"


@dataclass(frozen=True)
class PruneRequest:
    """Why the job ends early, and whether its checkpoints stay."""

    reason: str
    keep_checkpoint: bool


def ask_to_prune(run_dir: Path, request: PruneRequest) -> None:
    """Ask the job in this directory to end. To ask again changes nothing. Raises OSError."""
    write_json(run_dir / PRUNE, asdict(request))


def prune_request(run_dir: Path) -> PruneRequest | None:
    """The request in this directory; None if there is none, or none that can be read."""
    try:
        return PruneRequest(**read_json(run_dir / PRUNE))
    except (OSError, ValueError, TypeError):
        return None
