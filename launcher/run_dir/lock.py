"""The lock of a run's directory: one process at a time, released at the latest when that process ends.

Owns the lock file, the holder recorded in it, and the error for a process that cannot take it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
from pathlib import Path
from socket import gethostname

from launcher.errors import ConfigError

LOCK = ".lock"


def locked(directory: Path, key: str = "run.dir") -> io.FileIO:
    """Lock out all other processes until the result is closed, or until this process ends.

    `key` names the directory in errors. Raises ConfigError where another process holds it, and OSError.
    """
    lock = open(directory / LOCK, "a+b", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            lock.seek(0)
            holder = Holder.of(lock.read().decode(errors="replace"))
        raise ConfigError(
            f"{key}={directory} is in use by {holder}. Wait for it or stop it, or choose another directory."
        ) from None
    os.register_at_fork(after_in_child=lock.close)  # a child would hold it after this process has ended
    lock.truncate(0)
    lock.write(Holder.this().text.encode())
    return lock


def holder_of(directory: Path) -> Holder | None:
    """The process that took the lock last; it may have ended. None without one. Raises OSError."""
    path = directory / LOCK
    return Holder.of(path.read_text(errors="replace")) if path.exists() else None


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that took a lock."""

    pid: int  # 0: unknown
    host: str

    @classmethod
    def this(cls) -> Holder:
        return cls(os.getpid(), gethostname())

    @classmethod
    def of(cls, text: str) -> Holder:
        """Parse the content of a lock file, which may be empty or torn."""
        pid, host = (*text.split(), "", "")[:2]
        return cls(int(pid) if pid.isdecimal() else 0, host)

    def __str__(self) -> str:
        return f"another process (pid {self.pid or 'unknown'} on {self.host or 'its machine'})"

    @property
    def text(self) -> str:
        """The content of a lock file."""
        return f"{self.pid} {self.host}"

    @property
    def has_ended(self) -> bool | None:
        """Whether the process no longer exists; None if unknown, as on another machine."""
        if not self.pid or self.host != gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # of another user
            return False
        return False
