"""The checkpoints of a run: which are intact, and which to keep.

Owns their order (by step, never by time), the search for the newest intact one, and retention. Damaged ones
are reported and renamed, never deleted. Others are renamed before they are deleted.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.format import DAMAGED, UNFINISHED, read_state, set_aside
from launcher.checkpoint.manifest import looks_whole, verify
from launcher.checkpoint.snapshot import Compared
from launcher.errors import ConfigError, StorageError
from launcher.run_dir.atomic import restored
from launcher.run_dir.records import CHECKPOINTS

FOLDER = CHECKPOINTS
REPLACED = "replaced-"
DELETED = ".deleted-"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Damage:
    """A damaged checkpoint that was skipped, and why."""

    name: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({'; '.join(self.problems)})"


@dataclass(frozen=True)
class Found:
    """The chosen checkpoint, None for a fresh start, and the damaged ones that were skipped."""

    path: Path | None
    damaged: tuple[Damage, ...] = ()


def step_of(path: Path) -> int:
    """The step of a checkpoint, also of a renamed one."""
    match = _STEP.search(path.name)
    assert match is not None
    return int(match[1])


def candidates(directory: Path) -> list[Path]:
    """Everything named like a checkpoint, newest step first; empty without the directory.

    Raises ConfigError for symbolic links, StorageError where the directory cannot be read.
    """
    _refuse_link(directory)
    try:
        found = [path for path in directory.iterdir() if _STEP.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            f"the checkpoints in {directory} cannot be listed: {error.strerror or error}. It must be a "
            "directory that all ranks can read."
        ) from error
    for path in found:
        _refuse_link(path)
    return sorted(found, key=step_of, reverse=True)


def newest_intact(directory: Path, rename_damaged: bool = True) -> Found:
    """The intact checkpoint of the highest step, and the damaged ones of higher steps.

    Damaged ones are renamed to `damaged-...` unless `rename_damaged` is false. Raises ConfigError for
    symbolic links and newer formats, StorageError where the directory cannot be read.
    """
    return _first_intact(candidates(directory), rename_damaged)


def best_intact(directory: Path) -> Path | None:
    """The intact checkpoint with the best metric, as `by_metric`. Renames nothing."""
    return _first_intact(by_metric(candidates(directory)), rename_damaged=False).path


def by_metric(paths: Sequence[Path]) -> list[Path]:
    """The `paths` with the metric of the newest that has one, best first; of equal ones the first in the run.

    A run that was resumed with another compare_by has checkpoints of both metrics, which cannot be compared.
    """
    measured = [(metric, path) for path in paths if (metric := _metric_of(path)) is not None]
    if not measured:
        return []
    newest, _ = max(measured, key=lambda pair: step_of(pair[1]))
    costs = [(metric.cost, step_of(path), path) for metric, path in measured if metric.is_like(newest)]
    return [path for *_, path in sorted(costs)]


def retain(
    directory: Path, keep: int, best: Path | None = None, own: Collection[Path] = frozenset()
) -> list[Path]:
    """Delete all but the `keep` newest good checkpoints and `best`; returns what was deleted.

    Good ones are verified, so unfinished or damaged ones never displace them. For those in `own`, written by
    this process, file sizes are enough. Also deletes unfinished ones of killed processes. Raises
    StorageError.
    """
    assert keep >= 1
    good: list[Path] = []
    for path in candidates(directory):
        # All checkpoints to keep are verified before the first one is deleted.
        if len(good) >= keep or (looks_whole(path) if path in own else not verify(path)):
            good.append(path)
    deleted = [path for path in good[keep:] if path != best]
    try:
        for path in deleted:
            # Renamed first: a kill within rmtree would leave half a checkpoint under the name of a whole one.
            shutil.rmtree(path.rename(path.with_name(DELETED + path.name)))
        for rest in (*directory.glob(f"{UNFINISHED}*"), *directory.glob(f"{DELETED}*")):
            shutil.rmtree(rest)
    except OSError as error:
        raise StorageError(
            f"old checkpoints in {directory} cannot be deleted: {error.strerror or error} "
            f"({error.filename}). Delete them by hand if they take too much space."
        ) from error
    return deleted


def set_aside_replaced(directory: Path, resumed: Path | None) -> list[Path]:
    """Rename checkpoints of later steps than `resumed`, or all on a fresh start, to `replaced-...`.

    Otherwise the run could later resume from steps that it has discarded. Raises OSError.
    """
    present = candidates(directory)
    if resumed is not None:
        if resumed.parent.resolve() != directory.resolve():
            return []  # chosen only where this directory has no intact checkpoint
        step = step_of(resumed)
        present = [path for path in present if step_of(path) >= step and path.name != resumed.name]
    return [set_aside(path, REPLACED) for path in present]


def _first_intact(paths: Sequence[Path], rename_damaged: bool) -> Found:
    damaged: list[Damage] = []
    for path in paths:
        problems = verify(path)
        if not problems:
            return Found(path, tuple(damaged))
        damaged.append(Damage(path.name, tuple(problems)))
        if rename_damaged:
            with contextlib.suppress(OSError):  # reported in any case, and never loaded
                set_aside(path, DAMAGED)
    return Found(None, tuple(damaged))


def _metric_of(path: Path) -> Compared | None:
    """The metric of a checkpoint; None where it has none, or none that is a number."""
    try:
        metric = Compared(**restored(read_state(path)["metric"]))
        return None if math.isnan(metric.cost) else metric
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a symbolic link to {path.readlink()}. Links to checkpoints are not followed: "
            "remove the link, or give its target with checkpoint.resume=PATH or run.dir=DIR."
        )
