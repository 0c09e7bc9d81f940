"""The checkpoints of a run: which are intact, which to keep, and from which one to resume.

Owns their order (by step, never by time), the search for the newest intact one, retention, and the agreement
of the ranks: rank 0 chooses, and all accept its choice or all raise. Damaged checkpoints are reported and
renamed, never deleted. Others are renamed before they are deleted.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from launcher.checkpoint.format import DAMAGED, UNFINISHED, load, read, read_state, set_aside
from launcher.checkpoint.manifest import MANIFEST, looks_whole, manifest_digest, verify
from launcher.checkpoint.sending import at_hand
from launcher.checkpoint.snapshot import Compared, Identity, Snapshot
from launcher.distributed.collectives import of_leader, raised_on_all
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError, LauncherError, StorageError
from launcher.run_dir.atomic import failing_as_storage_error, restored
from launcher.run_dir.records import CHECKPOINTS

FOLDER = CHECKPOINTS
REPLACED = "replaced-"
DELETED = ".deleted-"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Found:
    """The chosen checkpoint, None for a fresh start, and why others were skipped, by name: damaged ones.

    `snapshot` is its content, once it has been read to resume from.
    """

    path: Path | None
    damaged: Mapping[str, str] = field(default_factory=dict)
    snapshot: Snapshot | None = None

    @property
    def seen(self) -> str:
        """What was skipped, as the end of an error."""
        names = ", ".join(f"{name} ({problems})" for name, problems in self.damaged.items())
        return f" Damaged: {names}." if names else ""


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
    found: list[Path] = []
    what = f"the checkpoints in {directory} cannot be listed"
    rule = "It must be a directory that all ranks can read."
    with failing_as_storage_error(what, rule), contextlib.suppress(FileNotFoundError):
        found = [path for path in directory.iterdir() if _STEP.fullmatch(path.name)]
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
    what = f"old checkpoints in {directory} cannot be deleted"
    with failing_as_storage_error(what, "Delete them by hand if they take too much space."):
        for path in deleted:
            # Renamed first: a kill within rmtree would leave half a checkpoint under the name of a whole one.
            shutil.rmtree(path.rename(path.with_name(DELETED + path.name)))
        for rest in (*directory.glob(f"{UNFINISHED}*"), *directory.glob(f"{DELETED}*")):
            shutil.rmtree(rest)
    return deleted


def _first_intact(paths: Sequence[Path], rename_damaged: bool) -> Found:
    damaged: dict[str, str] = {}
    for path in paths:
        if not (problems := verify(path)):
            return Found(path, damaged)
        damaged[path.name] = "; ".join(problems)
        if rename_damaged:
            with contextlib.suppress(OSError):  # reported in any case, and never loaded
                set_aside(path, DAMAGED)
    return Found(None, damaged)


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


AUTO, NEVER = "auto", "never"


def resume(env: WorkerEnv, directory: Path, wish: str, identity: Identity, own_disks: bool = False) -> Found:
    """Choose and read the checkpoint to resume from, as `checkpoint.resume` says. A collective.

    With `own_disks` rank 0 sends it to machines that do not have it. Raises on all ranks: ConfigError for the
    checkpoint of another run or a newer version, StorageError where the requested one is not intact, or where
    the ranks do not see the same files.
    """
    found = agree(env, directory, wish, own_disks)
    path, snapshot = found.path, None
    copy = at_hand(env, path, directory) if own_disks and path else contextlib.nullcontext(path)
    with copy as own, raised_on_all(env):
        if path is not None and own is not None:
            snapshot = read(own) if own == path else load(own)
            elsewhere = path.parent.resolve() != directory.resolve()
            identity.refuse_other(snapshot.identity, str(path), as_start=elsewhere)
    with raised_on_all(env):
        if env.is_leader:  # one process must rename
            _set_aside_replaced(directory, path)
    return replace(found, snapshot=snapshot)


def agree(env: WorkerEnv, directory: Path, wish: str = AUTO, own_disks: bool = False) -> Found:
    """Rank 0 chooses; the others verify that they see the same manifest digest. A collective.

    `wish`: `auto`, the newest intact checkpoint in `directory` if there is one; `never`; or the path of a
    checkpoint or of a run. A run that started from another run's checkpoint resumes from its own once it has
    an intact one. `directory` is this rank's view of it; with `own_disks` the choice may be missing there,
    but nothing later may be there. Raises on all ranks.
    """
    place, digest, damaged = json.loads(of_leader(env, partial(_choice, directory, wish)))
    # By this rank's own view of the directory, which may be mounted elsewhere than on rank 0.
    found = Found(None if place is None else directory / place, damaged)
    with raised_on_all(env):
        if not env.is_leader:
            _refuse_other_view(directory, found, digest, wish, own_disks)
    return found


def _choice(directory: Path, wish: str) -> bytes:
    """What rank 0 sends of its choice, as JSON: its name in the directory or its path, its digest, damage."""
    try:
        found = _choose(directory, wish)
        path = found.path
        digest = path and manifest_digest(path)
    except (OSError, ValueError) as error:  # for instance, deleted in the meantime
        of_run = wish in (AUTO, NEVER)
        what = f"the checkpoints in {directory} cannot be read" if of_run else f"checkpoint.resume={wish}"
        denied = isinstance(error, PermissionError)
        advice = "This user needs the permission to read it." if denied else "Start the run again."
        raise StorageError(f"{what}: {error}. {advice}") from error
    place = path and (path.name if path.parent == directory else str(path.absolute()))
    return json.dumps([place, digest, found.damaged]).encode()


def _choose(directory: Path, wish: str) -> Found:
    if wish == NEVER:
        return Found(None)
    if wish == AUTO:
        return newest_intact(directory)
    if not Path(wish).resolve().is_relative_to(directory.parent.resolve()):
        own = newest_intact(directory)
        if own.path is not None:
            return own  # the same command after a stop resumes the run instead of starting over
    found = _demanded(Path(wish))
    if found.path is None:
        raise StorageError(
            f"checkpoint.resume={wish}: there is no intact checkpoint.{found.seen} Give another one, or "
            "start a new run with checkpoint.resume=never."
        )
    return found


def _demanded(path: Path) -> Found:
    """The newest intact checkpoint at `path`: a checkpoint, a run, or the checkpoints folder of a run."""
    if not path.exists():
        raise ConfigError(
            f"checkpoint.resume={path}: there is no such directory. It must be auto, never, a run's "
            "directory or one of its checkpoints."
        )
    for directory in (path / FOLDER, path):
        if candidates(directory):
            return newest_intact(directory, rename_damaged=False)
    if (path / MANIFEST).exists() or path.is_symlink():
        return _first_intact([path], rename_damaged=False)
    return Found(None)


def _refuse_other_view(directory: Path, found: Found, digest: str | None, wish: str, own_disks: bool) -> None:
    """Raise StorageError where this rank does not see what rank 0 has chosen."""
    path, problems = found.path, []
    try:
        if path is None or own_disks:
            others = [other for other in candidates(directory) if other.name not in found.damaged]
            last = step_of(path) if path is not None and path.parent == directory else -1
            if others and step_of(others[0]) > last and wish != NEVER:
                problems = [f"{directory} holds {others[0].name}"]
        if path is not None and (path.is_dir() or not own_disks):
            problems += verify(path)
            if not problems and manifest_digest(path) != digest:
                problems = [f"its {path.name} has other content"]
    except (LauncherError, OSError, ValueError) as error:
        problems = [str(error)]
    if problems:
        rule = "run.dir must be a directory that all machines share"
        if own_disks:
            rule = "With launch.hosts=mixed, rank 0 must be on the machine that has the newest one"
        raise StorageError(
            f"the ranks do not see the same checkpoints: rank 0 resumes from {path or 'no checkpoint'}, but "
            f"on this rank {'; '.join(problems)}. {rule}."
        )


def _set_aside_replaced(directory: Path, resumed: Path | None) -> None:
    """Rename checkpoints of later steps than `resumed`, or all on a fresh start, to `replaced-...`.

    Otherwise the run could later resume from steps that it has discarded. Raises StorageError.
    """
    present = candidates(directory)
    if resumed is not None:
        if resumed.parent.resolve() != directory.resolve():
            return  # chosen only where this directory has no intact checkpoint
        step = step_of(resumed)
        present = [path for path in present if step_of(path) >= step and path.name != resumed.name]
    what = f"replaced checkpoints cannot be renamed in {directory}"
    with failing_as_storage_error(what, "The run must be able to write there: make it writable."):
        for path in present:
            set_aside(path, REPLACED)
