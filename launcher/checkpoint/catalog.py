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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.checkpoint.format import DAMAGED, UNFINISHED, load, read, read_state, set_aside
from launcher.checkpoint.manifest import MANIFEST, looks_whole, manifest_digest, verify
from launcher.checkpoint.sending import at_hand
from launcher.checkpoint.snapshot import Compared, Identity, Snapshot
from launcher.distributed.collectives import send_to_all
from launcher.distributed.env import LEADER, WorkerEnv
from launcher.distributed.messages import content_of, message_of, raised_on_all
from launcher.errors import ConfigError, LauncherError, StorageError
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
    """The chosen checkpoint, None for a fresh start, and the damaged ones that were skipped.

    `snapshot` is its content, once it has been read to resume from.
    """

    path: Path | None
    damaged: tuple[Damage, ...] = ()
    snapshot: Snapshot | None = None

    @property
    def seen(self) -> str:
        """What was skipped, as the end of an error."""
        return f" Damaged: {', '.join(map(str, self.damaged))}." if self.damaged else ""


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


AUTO, NEVER = "auto", "never"


def resume(env: WorkerEnv, directory: Path, wish: str, identity: Identity, own_disks: bool = False) -> Found:
    """Choose and read the checkpoint to resume from, as `checkpoint.resume` says. A collective.

    With `own_disks` rank 0 sends it to machines that do not have it. Raises on all ranks: ConfigError for the
    checkpoint of another run or a newer version, StorageError where the requested one is not intact, or where
    the ranks do not see the same files.
    """
    found = agree(env, directory, wish, own_disks)
    path, snapshot = found.path, None
    with (
        at_hand(env, path, directory) if own_disks and path else contextlib.nullcontext(path) as own,
        raised_on_all(env),
    ):
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
    own = message_of(partial(_choice, directory, wish)) if env.is_leader else b""
    values = json.loads(content_of(send_to_all(env, own, LEADER)))
    damaged = tuple(Damage(name, tuple(problems)) for name, problems in values["damaged"])
    path = None if values["path"] is None else Path(values["path"])
    # By this rank's own view of the directory, which may be mounted elsewhere than on rank 0.
    if path is not None and values["inside"]:
        path = directory / path.name
    found = Found(path, damaged)
    with raised_on_all(env):
        if not env.is_leader:
            _refuse_other_view(directory, found, values["digest"], wish, own_disks)
    return found


def _choice(directory: Path, wish: str) -> bytes:
    """What rank 0 sends of its choice, as JSON."""
    try:
        found = _choose(directory, wish)
        digest = None if found.path is None else manifest_digest(found.path)
    except (OSError, ValueError) as error:  # for instance, deleted in the meantime
        raise StorageError(
            f"the checkpoints in {directory} cannot be read: {error}. Start the run again."
        ) from error
    values = {
        "path": None if found.path is None else str(found.path.absolute()),
        "inside": found.path is not None and found.path.parent == directory,
        "digest": digest,
        "damaged": [(damage.name, damage.problems) for damage in found.damaged],
    }
    return json.dumps(values).encode()


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
        problems = verify(path)
        return Found(None, (Damage(path.name, tuple(problems)),)) if problems else Found(path)
    return Found(None)


def _refuse_other_view(
    directory: Path, chosen: Found, digest: str | None, wish: str, own_disks: bool
) -> None:
    """Raise StorageError where this rank does not see what rank 0 has chosen."""
    path, problems = chosen.path, []
    try:
        if path is None or own_disks:
            passed_over = {damage.name for damage in chosen.damaged}
            others = [other for other in candidates(directory) if other.name not in passed_over]
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
        rule = (
            "With launch.hosts=mixed, rank 0 must be on the machine that has the newest one"
            if own_disks
            else "run.dir must be a directory that all machines share"
        )
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
    try:
        for path in present:
            set_aside(path, REPLACED)
    except OSError as error:
        raise StorageError(
            f"replaced checkpoints cannot be renamed in {directory}: {error}. "
            "The run must be able to write there: make the directory writable."
        ) from error
