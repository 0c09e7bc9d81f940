"""Which processes end with which: a worker with its launcher, forked children with their worker.

Owns the requests to the kernel, which keep their promise when nobody is left to run code. Imports no torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux: linux/prctl.h
F_SETSIG = 10  # linux/fcntl.h; Python has no name for it before 3.13


def end_with(parent: int) -> None:
    """Be killed when the parent's thread that started this process ends.

    To be called where that is its main thread, which lives as long as the process does.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew of our wish
        os._exit(1)


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """Under torchrun, which starts its workers from its main thread: do not train on without it."""
    if "TORCHELASTIC_RUN_ID" in environ:
        end_with(os.getppid())


class Leash:
    """Every process forked from this one, however deep, is killed when this one ends.

    Not by PR_SET_PDEATHSIG: that one comes when the forking thread ends, and is lost by who forks twice. A
    child holds the read end of a pipe and asks for SIGKILL on its hangup; only this process has the write
    end. The tie is lost by a program that is executed and by a child that closes foreign descriptors.
    """

    def __init__(self) -> None:
        self.hangup, self._write = os.pipe()
        self._pipe = os.fstat(self.hangup).st_ino
        os.register_at_fork(after_in_child=self._tie)

    def _tie(self) -> None:
        if self._write >= 0:
            os.close(self._write)
            self._write = -1
        try:
            # Opened anew: the owner and the signal belong to the open file, which forks share.
            own = os.open(f"/proc/self/fd/{self.hangup}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        if (
            os.fstat(own).st_ino != self._pipe
        ):  # the process that forked us has closed it, and used the number
            return os.close(own)
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
        hangup = select.poll()
        hangup.register(own, 0)
        if hangup.poll(0):  # it ended before we asked
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of what the workers leave behind when they end, so that it can be found."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


class Orphans:
    """The processes that workers of this process have left behind. To be made before the workers start."""

    def __init__(self) -> None:
        self._others = _children()

    def reap(self, workers: Collection[int]) -> None:
        """Let those go that have ended."""
        for pid in self._adopted(workers):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def end(self, workers: Collection[int], timeout_s: float = 2.0) -> None:
        """Kill them all, and those that they leave behind in turn. `workers` have ended."""
        deadline = time.monotonic() + timeout_s
        while (adopted := self._adopted(workers)) and time.monotonic() < deadline:
            for pid in adopted:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
            self.reap(workers)

    def _adopted(self, workers: Collection[int]) -> set[int]:
        return _children() - self._others - set(workers)


def _children() -> set[int]:
    """Of all threads of this process; none where the kernel does not list them."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found |= {int(pid) for pid in (thread / "children").read_text().split()}
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
