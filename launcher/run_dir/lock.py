"""The lock of a run's directory: one process at a time, and none beyond its end.

Owns the file, what it says about its holder, and who is named to a process that it keeps out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import os
from pathlib import Path

from launcher.errors import ConfigError
from launcher.run_dir.atomic import open_plain

LOCK = ".lock"


def locked(directory: Path) -> io.FileIO:
    """Keep every other process out until the result is closed, at the latest by the end of this process.

    Raises ConfigError where another process holds it, and OSError.
    """
    descriptor = open_plain(directory / LOCK, os.O_RDWR | os.O_CREAT)
    lock = open(descriptor, "r+b", buffering=0)  # noqa: SIM115  # closed by the caller
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            holder = Holder.of(lock.read().decode(errors="replace"))
        raise ConfigError(
            f"run.dir={directory} is in use by {holder.named(directory / LOCK)}, or choose another directory."
        ) from None
    os.register_at_fork(after_in_child=lock.close)  # a child would hold it beyond our end
    lock.truncate(0)
    lock.write(str(Holder.this()).encode())
    return lock


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that took the lock, so that another one with its number is not taken for it."""

    pid: int
    started: str  # in clock ticks after the machine's start
    machine: str  # this start of it, and its numbering of processes

    @classmethod
    def this(cls) -> Holder:
        return cls(os.getpid(), _start_of(os.getpid()), _machine())

    @classmethod
    def of(cls, text: str) -> Holder:
        """What a lock says. Older versions wrote the number alone."""
        pid, started, machine = (*text.split(), "", "", "")[:3]
        return cls(int(pid) if pid.isdecimal() else 0, started, machine)

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.machine}"

    def named(self, lock: Path) -> str:
        """Who is in the way, and what to do about it."""
        has_ended = self.machine == _machine() and _start_of(self.pid) != self.started
        if not has_ended:
            return (
                f"another process (pid {self.pid or 'unknown'} of its machine). Wait for its end or stop it"
            )
        others = ", ".join(f"pid {pid}" for pid in _who_has_open(lock)) or "of another user"
        return f"what pid {self.pid}, which has ended, left behind: {others}. End that"


def _start_of(pid: int) -> str:
    """Empty where there is no such process, or a dead one that nobody has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _who_has_open(file: Path) -> list[int]:
    """The processes that hold a descriptor of the file, but for this one."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.samefile(file):
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})
