"""A checkpoint on the disk of rank 0's machine only, and how the other machines get it.

Owns the copy that a machine without it has until it is read. The reader verifies it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from launcher.checkpoint.manifest import MANIFEST, OPTIMIZER, STATE, WEIGHTS
from launcher.distributed.collectives import exchange_texts, of_leader, raised_on_all
from launcher.distributed.env import WorkerEnv
from launcher.run_dir.atomic import failing_as_storage_error, open_plain

RECEIVED = ".received-"
PIECE_BYTES = 16 << 20  # in memory several times on each rank, on a GPU's too


@contextmanager
def at_hand(env: WorkerEnv, path: Path, directory: Path) -> Iterator[Path]:
    """The checkpoint at `path` within the context, or this machine's copy of rank 0's where it is not there.

    `directory` is for the copy, which the first rank of the machine writes, and removes at the end. A
    collective. Raises StorageError on all ranks where a machine has no room for it.
    """
    lacks = not path.is_dir()
    if not any(exchange_texts(env, "lacks" if lacks else "")):
        yield path
        return
    copy = directory / f"{RECEIVED}{path.name}"
    writes = lacks and env.local_rank == 0
    try:
        with raised_on_all(env), _sending(copy):
            if writes:
                shutil.rmtree(copy, ignore_errors=True)  # of a process that was killed
                copy.mkdir(parents=True)
        for name in (WEIGHTS, OPTIMIZER, STATE, MANIFEST):
            _send(env, path / name, copy / name if writes else None)
        yield copy if lacks else path
    finally:
        if writes:
            shutil.rmtree(copy, ignore_errors=True)


def _send(env: WorkerEnv, source: Path, target: Path | None) -> None:
    """Send a file of rank 0 to all, piece by piece; this rank writes it to `target`. A collective."""
    start, piece = 0, b""
    while start == 0 or len(piece) == PIECE_BYTES:
        piece = of_leader(env, partial(_piece, source, start))
        with raised_on_all(env), _sending(target):
            if target is not None:
                with open(target, "ab") as file:
                    file.write(piece)
        start += PIECE_BYTES


def _piece(file: Path, start: int) -> bytes:
    with _sending(file), open(open_plain(file, os.O_RDONLY), "rb") as opened:
        opened.seek(start)
        return opened.read(PIECE_BYTES)


def _sending(path: Path | None) -> AbstractContextManager[None]:
    what = f"the checkpoint of rank 0 cannot be sent to machines that do not see it: {path}"
    return failing_as_storage_error(what, "Make room there, or give a run.dir that all machines share.")
