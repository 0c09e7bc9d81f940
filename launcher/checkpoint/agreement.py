"""What to resume from: chosen once, by rank 0, and seen alike by all ranks or refused by all.

Owns the agreement between the ranks. Everything here that communicates is called by all ranks at the same
point; what may fail on one rank alone becomes a value first, which all ranks then exchange.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.catalog import (
    FOLDER,
    Damage,
    Found,
    candidates,
    newest_intact,
    set_aside_other_course,
)
from launcher.checkpoint.format import read
from launcher.checkpoint.manifest import MANIFEST, manifest_digest, verify
from launcher.checkpoint.snapshot import Identity, Snapshot
from launcher.distributed.collectives import exchange_texts
from launcher.distributed.process_group import WorkerEnv
from launcher.errors import ConfigError, LauncherError, StorageError

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class Agreement:
    """The checkpoint that all ranks see alike, None for a fresh start, and the damaged ones passed over."""

    path: Path | None
    damaged: tuple[Damage, ...] = ()


@dataclass(frozen=True)
class Resumption:
    """What a run resumes from; `snapshot` and `path` are None for a fresh start."""

    snapshot: Snapshot | None
    path: Path | None
    damaged: tuple[Damage, ...] = ()


def resume(env: WorkerEnv, directory: Path, wish: str, identity: Identity) -> Resumption:
    """Choose and read the checkpoint to resume from, as `checkpoint.resume` says. A collective.

    Raises on all ranks alike: ConfigError for another run's or a newer version's checkpoint, StorageError
    where none is intact although one was demanded, or where the ranks do not see the same.
    """
    agreement = agree(env, directory, wish)
    snapshot, complaint = None, ""
    if agreement.path is not None:
        elsewhere = agreement.path.parent.resolve() != directory.resolve()
        snapshot, complaint = _read_if_fitting(agreement.path, identity, as_start=elsewhere)
    _all_or_none(env, complaint)
    # The leader alone, as only one process may rename; its failure is everyone's.
    _all_or_none(env, _leave_other_course(directory, agreement.path) if env.is_leader else "")
    return Resumption(snapshot, agreement.path, agreement.damaged)


def agree(env: WorkerEnv, directory: Path, wish: str = AUTO) -> Agreement:
    """Rank 0 chooses, the others verify that they see the same, by the manifest's digest. A collective.

    `wish`: `auto`, the newest intact one in `directory` if there is any; `never`; or the path of a
    checkpoint or of a run. Another run's is where this one begins: once it has an intact checkpoint of its
    own, it resumes from that. `directory` is this rank's own view. Raises alike on all ranks.
    """
    verdict = _verdict(directory, wish) if env.is_leader else ""
    values = json.loads(exchange_texts(env, verdict)[0])
    if "error" in values:
        raise _error_of(values["error"])
    damaged = tuple(Damage(name, tuple(problems)) for name, problems in values["damaged"])
    path = None if values["path"] is None else Path(values["path"])
    if path is not None and values["inside"]:
        path = directory / path.name
    complaint = "" if env.is_leader else _other_view(directory, path, values["digest"], damaged, wish)
    _all_or_none(env, complaint)
    return Agreement(path, damaged)


def _verdict(directory: Path, wish: str) -> str:
    """Rank 0's choice, or the reason against any, as JSON: the other ranks wait for either."""
    try:
        found = _choose(directory, wish)
        digest = None if found.path is None else manifest_digest(found.path)
    except LauncherError as error:
        return json.dumps({"error": _complaint_of(error)})
    except (OSError, ValueError) as error:  # for instance, it has been deleted meanwhile
        unreadable = StorageError(f"the checkpoints in {directory} cannot be read: {error}. Start again.")
        return json.dumps({"error": _complaint_of(unreadable)})
    return json.dumps(
        {
            "path": None if found.path is None else str(found.path.absolute()),
            "inside": found.path is not None and found.path.parent == directory,
            "digest": digest,
            "damaged": [(damage.name, damage.problems) for damage in found.damaged],
        }
    )


def _choose(directory: Path, wish: str) -> Found:
    if wish == NEVER:
        return Found(None)
    if wish == AUTO:
        return newest_intact(directory)
    if not Path(wish).resolve().is_relative_to(directory.parent.resolve()):
        own = newest_intact(directory)
        if own.path is not None:
            return own  # the same command again, after a stop: it resumes instead of starting anew
    found = _demanded(Path(wish))
    if found.path is None:
        seen = f" Damaged: {', '.join(map(str, found.damaged))}." if found.damaged else ""
        raise StorageError(
            f"checkpoint.resume={wish}: there is no intact checkpoint.{seen} Give another one, or begin "
            "a new run with checkpoint.resume=never."
        )
    return found


def _demanded(path: Path) -> Found:
    """An intact checkpoint at `path`, which is one itself, or a run, or a run's checkpoints."""
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


def _other_view(
    directory: Path, path: Path | None, digest: str | None, damaged: tuple[Damage, ...], wish: str
) -> str:
    """Why this rank cannot resume from what rank 0 chose; empty where it sees the same."""
    try:
        if path is None:
            passed_over = {damage.name for damage in damaged}
            others = [found.name for found in candidates(directory) if found.name not in passed_over]
            if wish == NEVER or not others:
                return ""
            problems = [f"{directory} holds {others[0]}"]
        else:
            problems = verify(path)
            if not problems and manifest_digest(path) != digest:
                problems = [f"its {path.name} is another"]
    except (LauncherError, OSError, ValueError) as error:
        problems = [str(error)]
    if not problems:
        return ""
    chosen = "no checkpoint" if path is None else str(path)
    return _complaint_of(
        StorageError(
            f"the ranks do not see the same checkpoints: rank 0 resumes from {chosen}, and this rank does "
            f"not see that: {'; '.join(problems)}. run.dir must be a directory that all machines share."
        )
    )


def _read_if_fitting(path: Path, identity: Identity, *, as_start: bool) -> tuple[Snapshot | None, str]:
    try:
        snapshot = read(path)
        identity.refuse_other(snapshot.identity, str(path), as_start=as_start)
    except LauncherError as error:
        return None, _complaint_of(error)
    return snapshot, ""


def _leave_other_course(directory: Path, resumed: Path | None) -> str:
    try:
        set_aside_other_course(directory, resumed)
    except LauncherError as error:
        return _complaint_of(error)
    except OSError as error:
        return _complaint_of(
            StorageError(
                f"checkpoints of another course cannot be set aside in {directory}: {error}. The run could "
                "not write its own there either: make the directory writable."
            )
        )
    return ""


def _complaint_of(error: LauncherError) -> str:
    return json.dumps({"exit": error.exit_code, "text": str(error)})


def _error_of(complaint: str) -> LauncherError:
    values = json.loads(complaint)
    kind = ConfigError if values["exit"] == ConfigError.exit_code else StorageError
    return kind(values["text"])


def _all_or_none(env: WorkerEnv, complaint: str) -> None:
    """Raise on all ranks if any of them complains; all see the same complaints. A collective."""
    complaints = exchange_texts(env, complaint)
    ranks = [rank for rank, text in enumerate(complaints) if text]
    if not ranks:
        return
    error = _error_of(complaints[ranks[0]])
    if len(ranks) < env.world_size:
        error = type(error)(f"on rank {', '.join(map(str, ranks))}: {error}")
    raise error
