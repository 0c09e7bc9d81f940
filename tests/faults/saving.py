"""What child processes of the fault tests do with checkpoints, and the faults that they call upon themselves.

The faults wrap the operating system's calls in the child alone: the product knows nothing of them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.ranks.harness import forkserver

CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18


def in_a_child(work: Callable[..., Any], *args: Any) -> tuple[Any, Connection]:
    """Start `work(pipe, *args)` in a process forked from one that has imported torch; (process, pipe)."""
    context = forkserver()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def outcome_of(work: Callable[..., Any], *args: Any) -> tuple[int, list[Any]]:
    """The exit code of the child (negative: the signal) and all that it sent."""
    process, pipe = in_a_child(work, *args)
    said = []
    try:
        while True:
            said.append(pipe.recv())
    except EOFError:
        process.join(30)
    finally:
        process.kill()
        process.join()
        pipe.close()
    return process.exitcode, said


def save_for_ever(pipe: Connection, directory: Path) -> None:
    """Write one checkpoint after the other; sends each step that is safely there."""
    from launcher.checkpoint.async_writer import write_checkpoint
    from tests.snapshots import snapshot

    hurry = threading.Event()
    hurry.set()
    for step in range(1, 10_000):
        report = write_checkpoint(directory, 2, snapshot(step, num_values=20_000), hurry)
        pipe.send(report.step if report.error is None else str(report.error))


def save_on_a_full_disk(pipe: Connection, directory: Path) -> None:
    """The same on a file system of 128 KiB of which the second checkpoint would take more than is left."""
    from launcher.checkpoint.async_writer import write_checkpoint
    from launcher.checkpoint.catalog import newest_intact
    from tests.snapshots import snapshot

    try:
        mount_alone(b"tmpfs", directory, b"tmpfs", 0, b"size=128k")
    except OSError as error:
        pipe.send(f"cannot mount: {error}")
        return
    for step, num_values in ((1, 4), (2, 20_000), (3, 4)):
        _tell(pipe, write_checkpoint(directory, 2, snapshot(step, num_values=num_values), threading.Event()))
    found = newest_intact(directory)
    pipe.send((found.path and found.path.name, sorted(path.name for path in directory.iterdir())))


def save_in_a_read_only_place(pipe: Connection, directory: Path) -> None:
    """One that fits, then one into the same place after it has become read-only."""
    from launcher.checkpoint.async_writer import write_checkpoint
    from tests.snapshots import snapshot

    _tell(pipe, write_checkpoint(directory, 2, snapshot(1), threading.Event()))
    try:
        mount_alone(bytes(directory), directory, None, MS_BIND, None)
        _mount(bytes(directory), directory, None, MS_BIND | MS_REMOUNT | MS_RDONLY, None)
    except OSError as error:
        pipe.send(f"cannot mount: {error}")
        return
    _tell(pipe, write_checkpoint(directory, 2, snapshot(2), threading.Event()))


def _tell(pipe: Connection, report: Any) -> None:
    pipe.send((report.step, report.path and report.path.name, report.error and str(report.error)))


def mount_alone(source: bytes, target: Path, kind: bytes | None, flags: int, data: bytes | None) -> None:
    """Mount something that only this process and its threads see, and that goes with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno() or errno.EPERM))
    _mount(b"none", Path("/"), None, MS_REC | MS_PRIVATE, None)
    _mount(source, target, kind, flags, data)


def _mount(source: bytes, target: Path, kind: bytes | None, flags: int, data: bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source, bytes(target), kind, ctypes.c_ulong(flags), data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
