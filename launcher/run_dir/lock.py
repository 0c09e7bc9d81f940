"""The lock of a run's directory: one process at a time, released at the latest when that process ends.

Owns the lock file, the holder recorded in it, and the errors for a process that cannot take it, and for one
whose directory has been moved or replaced since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import os
from pathlib import Path

from launcher.config.messages import directory_override
from launcher.errors import TO_RESUME, ConfigError, StorageError
from launcher.run_dir.atomic import open_plain, read_regular

LOCK = ".lock"


def locked(directory: Path, key: str = "run.dir") -> io.FileIO:
    """Lock out all other processes until the result is closed, or until this process ends.

    `key` names the directory in errors. Raises ConfigError where another process holds it, and OSError.
    """
    descriptor = open_plain(directory / LOCK, os.O_RDWR | os.O_CREAT)
    lock = open(descriptor, "r+b", buffering=0)  # noqa: SIM115  # closed by the caller
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            holder = Holder.of(lock.read().decode(errors="replace"), os.fstat(descriptor).st_ino)
        raise ConfigError(
            f"{key}={directory} is in use by {holder.named(directory / LOCK)}, or choose another directory."
        ) from None
    os.register_at_fork(after_in_child=lock.close)  # a child would hold it after this process has ended
    lock.truncate(0)
    lock.write(f"{Holder.this()} {os.fstat(descriptor).st_ino}".encode())
    return lock


def holder_of(directory: Path) -> Holder | None:
    """The process that took the lock last; it may have ended. None without one. Raises OSError."""
    path = directory / LOCK
    if not path.exists():
        return None
    return Holder.of(read_regular(path).decode(errors="replace"), path.stat().st_ino)


class Held:
    """The directory of a run that is locked, followed where it is moved to. Checks nothing without a lock."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, -1
        with contextlib.suppress(FileNotFoundError):
            # O_PATH, because on NFS the lock could be released when another descriptor of it is closed.
            self._lock = os.open(directory / LOCK, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def problem(self) -> StorageError | None:
        """The error if the path leads to another directory now, or if another process has locked it.

        A deleted directory is none: the run makes it again, and saves there what it has trained.
        """
        present = self.present
        if present == self._directory:
            return None
        what = f"run.dir={self._directory} no longer leads to the directory of this run"
        if present is None:
            return StorageError(
                f"{what}: it or its {LOCK} was deleted, and another process uses the path now. To train on, "
                "choose another directory."
            )
        return StorageError(
            f"{what}, which is {present} now. The run has ended, because it would write to two directories. "
            f"{TO_RESUME} {directory_override('run.dir', present)}"
        )

    @property
    def present(self) -> Path | None:
        """Where the directory is now; None if it was deleted and another process has locked the path."""
        if self._lock < 0:
            return self._directory
        path, found = self._directory / LOCK, None
        try:
            own = os.fstat(self._lock)
            with contextlib.suppress(FileNotFoundError):
                found = path.stat().st_ino
            if found == own.st_ino:
                return self._directory
            if own.st_nlink:
                return Path(os.readlink(f"/proc/self/fd/{self._lock}")).parent
            return None if found is not None and _is_locked(path) else self._directory
        except OSError:  # the file system is away for a moment, or was, and the descriptor is stale
            return self._directory


def _is_locked(path: Path) -> bool:
    # Left locked by nobody, as in a copy on another file system with a link to it, it is no other run's.
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that took the lock, with its start time, because process ids are reused."""

    pid: int
    started: str  # in clock ticks since boot
    machine: str  # boot id and pid namespace
    is_copy: bool = False  # the lock is one of a copied directory: the process writes to the original

    @classmethod
    def this(cls) -> Holder:
        return cls(os.getpid(), _start_of(os.getpid()), _machine())

    @classmethod
    def of(cls, text: str, inode: int = 0) -> Holder:
        """Parse the content of the lock file with this inode; it may be empty or torn."""
        pid, started, machine, written_to = (*text.split(), "", "", "", "")[:4]
        is_copy = written_to not in ("", str(inode))
        return cls(int(pid) if pid.isdecimal() else 0, started, machine, is_copy)

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.machine}"

    @property
    def has_ended(self) -> bool | None:
        """Whether the process no longer exists; None if unknown, as on another machine."""
        if self.is_copy:
            return True
        if not self.started or self.machine != _machine():
            return None
        started = _start_of(self.pid)
        return None if not started and _is_hidden(self.pid) else started != self.started

    def named(self, lock: Path) -> str:
        """Who holds the lock, and what to do about it."""
        if not self.has_ended:
            return f"another process (pid {self.pid or 'unknown'} on its machine). Wait for it or stop it"
        others = ", ".join(f"pid {pid}" for pid in _who_has_open(lock)) or "of another user"
        return f"child processes of pid {self.pid}, which has ended: {others}. End them"


def _start_of(pid: int) -> str:
    """Start time of a process in clock ticks; empty for no such process and for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # starttime, field 22 of proc(5): the list begins with field 3, the state.
    return "" if fields[0] in "ZX" else fields[19]


def _is_hidden(pid: int) -> bool:
    """Whether /proc may hide the process because it is another user's."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _who_has_open(file: Path) -> list[int]:
    """The other processes that have the file open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.samefile(file):
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})
