"""A guardian process that ends all programs started from this process once it has ended.

An executed program loses every tie to the process that started it, but inherits its environment. A guardian,
forked while this process is small, waits for this process to end, then signals every process whose
environment contains a random value set here. It also ends this process if that is stopped for long (SIGSTOP)
while its parent is not, where that was asked for. It keeps no file, terminal or extra memory open. It cannot
find a program that was started with an environment without that value. Needs /proc; imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import select
import signal
import time
from pathlib import Path

from launcher.process.lifetime import state_of

VARIABLE = "LAUNCHER_ENDS_WITH"  # one value per launcher above this process
GRACE_S = 0.5  # from SIGTERM to SIGKILL: multiprocessing's resource tracker cleans up in between
GIVE_UP_S = 10.0  # a process in uninterruptible sleep cannot be killed
POLL_EVERY_S = 0.02  # between two looks at all of /proc, while something is left to end
LOOK_EVERY_S = 1.0  # whether the process is stopped


def start(hangup: int) -> None:
    """Start the guardian of this process. `hangup` is a pipe that hangs up when this process ends.

    It is reparented, so that a `wait()` for all children does not wait for it. Returns when it has closed
    what it inherited, a descriptor among them by which forks are killed when this process ends.
    """
    if not os.path.isdir("/proc/self"):
        return
    value, process = os.urandom(16).hex(), os.getpid()
    _limit()  # shared from the fork on
    closed, ready = os.pipe()  # hangs up when the guardian is ready, or is not there
    try:
        with contextlib.suppress(OSError):  # fork failed, or SIGCHLD is ignored: run without it
            child = os.fork()
            if child == 0:
                try:
                    os.setsid()  # a Ctrl-C must not reach it
                    if os.fork() == 0:
                        _guard(process, hangup, ready, value.encode())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
    finally:
        os.close(ready)
        os.read(closed, 1)
        os.close(closed)
    os.environ[VARIABLE] = ":".join(filter(None, (os.environ.get(VARIABLE), value)))


def end_if_stopped(seconds: float) -> None:
    """Let the guardian kill this process once it has been stopped for so long, and its parent has not.

    For a rank whose parent, torchrun, would wait for it for ever. Ctrl-Z stops both.
    """
    _limit()[0] = seconds


@functools.cache
def _limit() -> memoryview[float]:
    """The seconds of `end_if_stopped`, 0 if not asked for, in memory that is shared with the guardian."""
    return memoryview(mmap.mmap(-1, 8)).cast("d")


def _guard(process: int, hangup: int, ready: int, value: bytes) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (hangup, ready):
            with contextlib.suppress(OSError):
                os.close(int(name))
    os.chdir("/")
    os.close(ready)  # last: the process that waits for this may rely on all of the above
    end_of_process = select.poll()
    end_of_process.register(hangup, 0)
    stopped_s = 0.0  # counted in polls: the guardian may have been stopped too
    while not end_of_process.poll(1000 * LOOK_EVERY_S):
        limit_s = _limit()[0]
        stopped_s = stopped_s + LOOK_EVERY_S if limit_s and _is_alone_stopped(process) else 0.0
        if stopped_s > limit_s:
            os.kill(process, signal.SIGKILL)  # it lives: it holds the other end of the pipe
            break
    _end_all(value)


def _is_alone_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        state, parent = state_of(pid)
        return state == "T" and state_of(parent)[0] != "T"
    return False


def _end_all(value: bytes) -> None:
    """End all processes that have `value` in their environment, and those that they start meanwhile."""
    began, number = time.monotonic(), int(signal.SIGTERM)
    while _signal_all(value, number) and time.monotonic() - began < GIVE_UP_S:
        time.sleep(POLL_EVERY_S)
        number = signal.SIGKILL if time.monotonic() - began > GRACE_S else 0


def _signal_all(value: bytes, number: int) -> bool:
    """Signal all other processes that have the value; returns whether there are any."""
    found = False
    for pid in {int(name) for name in os.listdir("/proc") if name.isdecimal()} - {os.getpid()}:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if _is_marked(pid, value):
                os.kill(pid, number)  # microseconds later: its number is not another's yet
                found = True
    return found


def _is_marked(pid: int, value: bytes) -> bool:
    """Whether a process was started from here and not moved to another cgroup since."""
    here, there = Path("/proc/self"), Path(f"/proc/{pid}")
    return value in (there / "environ").read_bytes() and (
        (there / "cgroup").read_bytes() == (here / "cgroup").read_bytes()
    )
