"""Ties the lifetime of processes: a worker's to its launcher, forked children's to their worker.

Owns the requests to the kernel, which take effect even when no code can run any more. Imports no torch.
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
ENDS_WITH_STARTER = "LAUNCHER_ENDS_WITH_STARTER"  # set for a process that is to be killed with its parent
F_SETSIG = 10  # linux/fcntl.h; Python has no name for it before 3.13


def end_with(parent: int) -> None:
    """Be killed when the parent's thread that started this process ends.

    Call it only if that is the parent's main thread, which lives as long as the process.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)


def end_with_starter(environ: Mapping[str, str]) -> None:
    """Be killed when torchrun, wandb's agent, or what has set ENDS_WITH_STARTER ends.

    They start processes from a thread that lives as long as they do.
    """
    if {"TORCHELASTIC_RUN_ID", "WANDB_SWEEP_PARAM_PATH", ENDS_WITH_STARTER} & environ.keys():
        end_with(os.getppid())


class ParentDeathSignal:
    """Kills every process forked from this one, at any depth, when this one ends.

    PR_SET_PDEATHSIG is not enough: it fires when the forking thread ends, and does not reach grandchildren. A
    child holds the read end of a pipe and requests SIGKILL on its hangup; only this process has the write
    end. Executed programs, and children that close inherited descriptors, are not covered.
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
            # Reopened: owner and signal belong to the open file description, which forks share.
            own = os.open(f"/proc/self/fd/{self.hangup}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        if os.fstat(own).st_ino != self._pipe:  # our parent closed it and reused the number
            return os.close(own)
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
        hangup = select.poll()
        hangup.register(own, 0)
        if hangup.poll(0):  # it ended before the request
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def adopting() -> Iterator[None]:
    """Become the parent (child subreaper) of processes that workers leave behind, to find them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


class Orphans:
    """The processes that workers have left behind. Create it before the workers start."""

    def __init__(self) -> None:
        self._others = _children()

    def reap(self, workers: Collection[int]) -> None:
        """Reap those that have ended."""
        for pid in self._adopted(workers):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def end(self, workers: Collection[int], timeout_s: float = 2.0) -> None:
        """Kill them, and those that they leave behind in turn. `workers` have ended."""
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
    """Children of all threads of this process; empty if the kernel does not list them."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found |= {int(pid) for pid in (thread / "children").read_text().split()}
    return found


def state_of(pid: int) -> tuple[str, int]:
    """The state of a process, such as T for stopped, and its parent. Raises OSError."""
    # The name before ")" may hold spaces.
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
