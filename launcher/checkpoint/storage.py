"""One checkpoint as files: written atomically, verified before it is used.

Owns the content of weights.safetensors (fp32 masters, frozen parameters and buffers by name),
optimizer.safetensors and state.json. Never leaves a partial file under a final name and never executes what
it reads.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from launcher.checkpoint.manifest import (
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    manifest_of,
    step_name,
    verify,
)
from launcher.checkpoint.run_state import Snapshot
from launcher.checkpoint.tensors import (
    Pause,
    mapped,
    no_pause,
    write_bytes,
    write_tensors,
)
from launcher.config.codec import decoded, encoded
from launcher.engine.state import LazyTensors
from launcher.errors import StorageError
from launcher.run_dir.atomic import failing_as_storage_error

NOT_WRITTEN = (
    "Earlier ones are intact. Free disk space; the directory must be writable and hold no checkpoint of that "
    "step from another run."
)
UNFINISHED = ".unfinished-"
DAMAGED = "damaged-"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # from linux/fcntl.h and linux/fs.h
# Of the names in the second file, which holds what only a resume needs.
OPTIMIZER_STATE, BY_RANK = "optimizer/", "buffer_by_rank/"
AVERAGE, AVERAGE_BUFFER, AVERAGE_BY_RANK = "average/", "average_buffer/", "average_buffer_by_rank/"


def publish(directory: Path, snapshot: Snapshot, pause: Pause = no_pause) -> Path:
    """Write `snapshot` as a checkpoint in `directory`; it is on disk before this returns.

    It appears under its final name in one rename, or in one exchange where the step has a checkpoint already:
    the one of a run that was stopped before its evaluation. Raises StorageError.
    """
    step = snapshot.progress.step
    final = directory / step_name(step)
    temporary = directory / f"{UNFINISHED}{final.name}-{secrets.token_hex(4)}"
    what = f"the checkpoint of step {step} cannot be written to {directory}"
    with failing_as_storage_error(what, NOT_WRITTEN), ExitStack() as ending:
        # What is left under the temporary name: of a write that failed, or what was exchanged.
        ending.callback(shutil.rmtree, temporary, ignore_errors=True)
        _make_directory(directory)
        temporary.mkdir()
        _write_files(temporary, snapshot, pause)
        # The names of its files must be on disk before the directory gets its final name.
        sync_directory(temporary)
        if os.path.lexists(final):
            _exchange(temporary, final)
        else:
            os.rename(temporary, final)
        # Then the new name itself: after a power failure either it is there, complete, or not at all.
        sync_directory(directory)
    return final


def load(path: Path) -> Snapshot:
    """Verify a checkpoint and read it. Raises StorageError, with the damage, for a damaged one."""
    if problems := verify(path):
        raise StorageError(f"{path} is damaged: {'; '.join(problems)}.")
    return snapshot_of(*read_files(path))


def read_files(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """state.json and all tensors, mapped, of a verified checkpoint.

    Raises OSError; StorageError for other formats.
    """
    from safetensors import SafetensorError

    try:
        return read_state(path), mapped(path / WEIGHTS) | mapped(path / OPTIMIZER)
    except (SafetensorError, ValueError) as error:
        text = f"{path} is no checkpoint: {error}. Only safetensors and JSON are read."
        raise StorageError(text) from error


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a verified checkpoint. Raises OSError."""
    state: dict[str, Any] = json.loads((path / STATE).read_bytes())
    return state


def quarantine(path: Path, prefix: str) -> Path:
    """Rename a checkpoint so that it is no longer used, without losing any of it. Raises OSError."""
    number, target = 1, path.with_name(prefix + path.name)
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{prefix}{path.name}-{number}")
    os.rename(path, target)
    return target


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_files(directory: Path, snapshot: Snapshot, pause: Pause) -> None:
    engine = snapshot.engine
    metadata = {"format": "pt", "step": str(snapshot.progress.step)}
    # Everything but the tensors, and the names of those in the first file.
    state = encoded(_with_tensors(snapshot, {}, (), ()))
    state |= {"weights": [*engine.weights], "buffers": [*engine.buffers]}
    files = {
        WEIGHTS: write_tensors(directory / WEIGHTS, {**engine.weights, **engine.buffers}, metadata, pause),
        OPTIMIZER: write_tensors(directory / OPTIMIZER, _resume_tensors(snapshot), metadata, pause),
        STATE: write_bytes(directory / STATE, json.dumps(state, indent=1).encode()),
    }
    # Last, because it lists the digests of the others.
    write_bytes(directory / MANIFEST, manifest_of(snapshot.progress.step, files))


def _resume_tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    """What the second file holds."""
    parts: dict[str, Mapping[str, Tensor]] = {
        OPTIMIZER_STATE: snapshot.engine.optimizer,
        BY_RANK: snapshot.rank_buffers,
    }
    if average := snapshot.average:
        parts |= {AVERAGE: average.weights, AVERAGE_BUFFER: average.buffers}
        parts[AVERAGE_BY_RANK] = snapshot.average_buffers
    return {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()}


def snapshot_of(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Snapshot:
    """The state of the run that the files of a checkpoint hold."""
    return _with_tensors(decoded(Snapshot, state), tensors, state["weights"], state["buffers"])


def _with_tensors(
    snapshot: Snapshot,
    tensors: Mapping[str, Tensor],
    weights: Sequence[str],
    buffers: Sequence[str],
) -> Snapshot:
    """The snapshot with these tensors in place of its own; of the first file, those of the two lists."""
    engine = replace(
        snapshot.engine,
        weights=_renamed(tensors, {name: name for name in weights}),
        buffers={name: tensors[name] for name in buffers},
        optimizer=_under(OPTIMIZER_STATE, tensors),
    )
    average = snapshot.average and replace(
        snapshot.average, weights=_under(AVERAGE, tensors), buffers=dict(_under(AVERAGE_BUFFER, tensors))
    )
    by_rank, averages_by_rank = dict(_under(BY_RANK, tensors)), dict(_under(AVERAGE_BY_RANK, tensors))
    return replace(
        snapshot, engine=engine, average=average, rank_buffers=by_rank, average_buffers=averages_by_rank
    )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors whose names have the prefix, by their names without it."""
    return _renamed(tensors, {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)})


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Mapping[str, Tensor]:
    """The tensors of these names, given by the name that each gets."""
    if not isinstance(tensors, LazyTensors):
        return {new: tensors[old] for new, old in names.items()}
    forms = {new: tensors.forms[old] for new, old in names.items()}
    return LazyTensors(forms, lambda new: tensors[names[new]])


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories atomically: a kill leaves either of them under the name of `old`."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None and not renameat2(AT_FDCWD, bytes(new), AT_FDCWD, bytes(old), RENAME_EXCHANGE):
        return
    # The file system cannot. If killed between the next two renames, a run resumes from an earlier step.
    aside = new.with_name(f"{new.name}-old")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        directory.mkdir(parents=True)
        # Or a power failure could lose the new directory with all that is written into it.
        sync_directory(directory.parent)
