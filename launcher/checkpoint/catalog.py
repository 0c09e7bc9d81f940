"""The checkpoints of a run: which are intact, which to keep, and from which one to resume.

Owns their order (by step, never by time), the search for the newest intact one, and retention. Rank 0 chooses
and reads, and the others receive it. Damaged checkpoints that a resume meets are reported and renamed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from launcher.checkpoint.manifest import MANIFEST, step_name, verify
from launcher.checkpoint.run_state import RunIdentity, Snapshot, refuse_other
from launcher.checkpoint.storage import (
    DAMAGED,
    UNFINISHED,
    quarantine,
    read_files,
    read_state,
    snapshot_of,
)
from launcher.distributed.collectives import broadcast_tensors, from_rank0, raise_on_all_ranks
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError, StorageError
from launcher.run_dir.atomic import failing_as_storage_error
from launcher.run_dir.discarding import AUTO, NEVER, discards_steps, record_discarded
from launcher.run_dir.records import CHECKPOINTS

REPLACED = "replaced-"
DELETED = ".deleted-"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class ResumeChoice:
    """The chosen checkpoint, None for a fresh start, and why others were skipped, by name: damaged ones.

    `snapshot` is its content, once it has been read to resume from. Its weights, optimizer states and average
    are sent by rank 0 when all ranks ask for them, each once and in one order.
    """

    path: Path | None
    damaged: Mapping[str, str] = field(default_factory=dict)
    snapshot: Snapshot | None = None

    @property
    def damaged_text(self) -> str:
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
    found: list[Path] = []
    what = f"the checkpoints in {directory} cannot be listed"
    rule = "It must be a directory that all ranks can read."
    with failing_as_storage_error(what, rule), contextlib.suppress(FileNotFoundError):
        found = [path for path in directory.iterdir() if _STEP.fullmatch(path.name)]
    for path in found:
        _refuse_link(path)
    return sorted(found, key=step_of, reverse=True)


def newest_intact(directory: Path, rename_damaged: bool = True) -> ResumeChoice:
    """The intact checkpoint of the highest step, and the damaged ones of higher steps.

    Damaged ones are renamed to `damaged-...` unless `rename_damaged` is false. Raises ConfigError for
    symbolic links and other formats, StorageError where the directory cannot be read.
    """
    return _first_intact(candidates(directory), rename_damaged)


def best_intact(directory: Path) -> Path | None:
    """The checkpoint of the best evaluation, which the newest intact one names; None if it is not intact.

    Renames nothing.
    """
    newest = newest_intact(directory, rename_damaged=False).path
    best = None if newest is None else read_state(newest)["extra"].get("best")
    path = None if best is None else directory / step_name(best["step"])
    return None if path is None or verify(path) else path


def apply_retention(directory: Path, keep: int, best: Path | None = None) -> None:
    """Delete all but the `keep` newest checkpoints and `best`, and what killed processes have left.

    They are not verified here: a resume verifies the one that it takes, and renames damaged ones. Raises
    StorageError.
    """
    what = f"old checkpoints in {directory} cannot be deleted"
    with failing_as_storage_error(what, "Delete them by hand if they take too much space."):
        for path in candidates(directory)[keep:]:
            if path != best:
                # Renamed first: a kill within rmtree would leave half a checkpoint under a final name.
                shutil.rmtree(path.rename(path.with_name(DELETED + path.name)))
        for rest in (*directory.glob(f"{UNFINISHED}*"), *directory.glob(f"{DELETED}*")):
            shutil.rmtree(rest)


def _first_intact(paths: Sequence[Path], rename_damaged: bool) -> ResumeChoice:
    damaged: dict[str, str] = {}
    for path in paths:
        if not (problems := verify(path)):
            return ResumeChoice(path, damaged)
        damaged[path.name] = "; ".join(problems)
        if rename_damaged:
            with contextlib.suppress(OSError):  # reported in any case, and never loaded
                quarantine(path, DAMAGED)
    return ResumeChoice(None, damaged)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a symbolic link to {path.readlink()}. Links to checkpoints are not followed: "
            "remove the link, or give its target with checkpoint.resume=PATH or run.dir=DIR."
        )


def resume(env: WorkerEnv, directory: Path, resume_from: str, identity: RunIdentity) -> ResumeChoice:
    """Choose and read the checkpoint to resume from, as `checkpoint.resume` says. A collective.

    Rank 0 chooses, verifies and reads, whatever the others see themselves.
    `resume_from`: `auto`, the newest intact checkpoint in `directory` if there is one; `never`; or the path
    of a checkpoint or of a run. A run that started from another run's checkpoint resumes from its own once it
    has an intact one. Raises on all ranks: ConfigError for the checkpoint of another run or format,
    StorageError where the requested one is not intact.
    """
    read: dict[str, Tensor] = {}  # on rank 0

    def chosen() -> bytes:
        what = f"the checkpoints in {directory} or of checkpoint.resume={resume_from} cannot be read"
        with failing_as_storage_error(what, "Give this user the right to read them, or start again."):
            found = _choose(directory, resume_from)
            if found.path is None:
                return json.dumps([None, found.damaged, None, False]).encode()
            state, tensors = read_files(found.path)
            read.update(tensors)
        elsewhere = found.path.parent.resolve() != directory.resolve()
        return json.dumps([str(found.path.absolute()), found.damaged, state, elsewhere]).encode()

    path, damaged, state, elsewhere = json.loads(from_rank0(env, chosen))
    found = ResumeChoice(None if path is None else Path(path), damaged)
    if found.path is not None:
        tensors = broadcast_tensors(env, read)
        with raise_on_all_ranks(env):
            snapshot = snapshot_of(state, tensors)
            refuse_other(identity, snapshot.identity, str(found.path), as_start=elsewhere)
        found = replace(found, snapshot=snapshot)
    with raise_on_all_ranks(env):
        if env.is_rank0:  # one process must rename
            found = _set_aside_replaced(directory, found)
            if discards_steps(resume_from, directory.parent):
                with failing_as_storage_error(
                    f"{directory.parent} cannot be written to", "Make it writable."
                ):
                    record_discarded(directory.parent)
    return found


def _choose(directory: Path, resume_from: str) -> ResumeChoice:
    if resume_from == NEVER:
        return ResumeChoice(None)
    if resume_from == AUTO:
        return newest_intact(directory)
    damaged: Mapping[str, str] = {}
    if not discards_steps(resume_from, directory.parent):
        own = newest_intact(directory)
        if own.path is not None:
            return own  # the same command after a stop resumes the run instead of starting over
        damaged = own.damaged
    found = _explicit(Path(resume_from))
    if found.path is None:
        raise StorageError(
            f"checkpoint.resume={resume_from}: there is no intact checkpoint.{found.damaged_text} Give "
            "another one, or start a new run with checkpoint.resume=never."
        )
    return replace(found, damaged={**damaged, **found.damaged})


def _explicit(path: Path) -> ResumeChoice:
    """The newest intact checkpoint at `path`: a checkpoint, a run, or the checkpoints folder of a run."""
    if not path.exists():
        raise ConfigError(
            f"checkpoint.resume={path}: there is no such directory. It must be auto, never, a run's "
            "directory or one of its checkpoints."
        )
    for directory in (path / CHECKPOINTS, path):
        if candidates(directory):
            return newest_intact(directory, rename_damaged=False)
    if (path / MANIFEST).exists() or path.is_symlink():
        return _first_intact([path], rename_damaged=False)
    return ResumeChoice(None)


def _set_aside_replaced(directory: Path, resumed: ResumeChoice) -> ResumeChoice:
    """Rename checkpoints of later steps than the resumed one, or all on a fresh start, to `replaced-...`.

    Otherwise the run could later resume from steps that it has discarded. The resumed one gets its usual name
    again if it had been set aside itself. Returns it with the path that it now has. Raises StorageError.
    """
    present, chosen = candidates(directory), resumed.path
    step = 0 if resumed.snapshot is None else resumed.snapshot.progress.step
    own = chosen if chosen is not None and chosen.parent.resolve() == directory.resolve() else None
    what = f"replaced checkpoints cannot be renamed in {directory}"
    with failing_as_storage_error(what, "The run must be able to write there: make it writable."):
        for path in present:
            if step_of(path) >= step and (own is None or path.name != own.name):
                quarantine(path, REPLACED)
        if own is not None:
            resumed = replace(resumed, path=own.rename(directory / step_name(step)))
    return resumed
