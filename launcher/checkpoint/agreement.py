"""The choice of the checkpoint to resume from: rank 0 chooses, and all ranks accept it or all raise.

Owns the agreement between the ranks. All ranks call every collective here at the same point.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.checkpoint.catalog import (
    FOLDER,
    Damage,
    Found,
    candidates,
    newest_intact,
    set_aside_replaced,
)
from launcher.checkpoint.format import read
from launcher.checkpoint.manifest import MANIFEST, manifest_digest, verify
from launcher.checkpoint.snapshot import Identity, Snapshot
from launcher.distributed.collectives import send_to_all
from launcher.distributed.env import LEADER, WorkerEnv
from launcher.distributed.messages import content_of, message_of, raised_on_all
from launcher.errors import ConfigError, LauncherError, StorageError

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class Resumption:
    """What a run resumes from; `snapshot` and `path` are None for a fresh start."""

    snapshot: Snapshot | None
    path: Path | None
    damaged: tuple[Damage, ...] = ()


def resume(env: WorkerEnv, directory: Path, wish: str, identity: Identity) -> Resumption:
    """Choose and read the checkpoint to resume from, as `checkpoint.resume` says. A collective.

    Raises on all ranks: ConfigError for the checkpoint of another run or a newer version, StorageError where
    the requested one is not intact, or where the ranks do not see the same files.
    """
    found = agree(env, directory, wish)
    path, snapshot = found.path, None
    with raised_on_all(env):
        if path is not None:
            snapshot = read(path)
            elsewhere = path.parent.resolve() != directory.resolve()
            identity.refuse_other(snapshot.identity, str(path), as_start=elsewhere)
    with raised_on_all(env):
        if env.is_leader:  # one process must rename
            _set_aside_replaced(directory, path)
    return Resumption(snapshot, path, found.damaged)


def agree(env: WorkerEnv, directory: Path, wish: str = AUTO) -> Found:
    """Rank 0 chooses; the others verify that they see the same manifest digest. A collective.

    `wish`: `auto`, the newest intact checkpoint in `directory` if there is one; `never`; or the path of a
    checkpoint or of a run. A run that started from another run's checkpoint resumes from its own once it has
    an intact one. `directory` is this rank's view of it. Raises on all ranks.
    """
    own = message_of(partial(_choice, directory, wish)) if env.is_leader else b""
    values = json.loads(content_of(send_to_all(env, own, LEADER)))
    damaged = tuple(Damage(name, tuple(problems)) for name, problems in values["damaged"])
    path = None if values["path"] is None else Path(values["path"])
    # By this rank's own view of the directory, which may be mounted elsewhere than on rank 0.
    if path is not None and values["inside"]:
        path = directory / path.name
    with raised_on_all(env):
        if not env.is_leader:
            _refuse_other_view(directory, path, values["digest"], damaged, wish)
    return Found(path, damaged)


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
        seen = f" Damaged: {', '.join(map(str, found.damaged))}." if found.damaged else ""
        raise StorageError(
            f"checkpoint.resume={wish}: there is no intact checkpoint.{seen} Give another one, or start "
            "a new run with checkpoint.resume=never."
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
    directory: Path, path: Path | None, digest: str | None, damaged: tuple[Damage, ...], wish: str
) -> None:
    """Raise StorageError where this rank does not see what rank 0 has chosen."""
    try:
        if path is None:
            passed_over = {damage.name for damage in damaged}
            others = [found.name for found in candidates(directory) if found.name not in passed_over]
            problems = [f"{directory} holds {others[0]}"] if others and wish != NEVER else []
        else:
            problems = verify(path)
            if not problems and manifest_digest(path) != digest:
                problems = [f"its {path.name} has other content"]
    except (LauncherError, OSError, ValueError) as error:
        problems = [str(error)]
    if problems:
        chosen = "no checkpoint" if path is None else str(path)
        raise StorageError(
            f"the ranks do not see the same checkpoints: rank 0 resumes from {chosen}, but on this "
            f"rank {'; '.join(problems)}. run.dir must be a directory that all machines share."
        )


def _set_aside_replaced(directory: Path, resumed: Path | None) -> None:
    try:
        set_aside_replaced(directory, resumed)
    except OSError as error:
        raise StorageError(
            f"replaced checkpoints cannot be renamed in {directory}: {error}. "
            "The run must be able to write there: make the directory writable."
        ) from error
