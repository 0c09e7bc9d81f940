"""Ties the lifetime of processes: a worker's to its launcher, forked children's to their worker.

Owns the requests to the kernel, which take effect even when no code can run any more. A process that a
recipe executes (subprocess) is in its worker's process group and is killed with that; one that leaves the
group (setsid) is the recipe's own. Imports no torch.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux: linux/prctl.h
# Starts the launcher anew as this process was: -P keeps the working directory out of sys.path.
PYTHON = (sys.executable, *(["-P"] if sys.flags.safe_path else []))
ENDS_WITH_STARTER = "LAUNCHER_ENDS_WITH_STARTER"  # set for a process that is to be killed with its parent


def die_with_parent(parent: int) -> None:
    """Be killed when the parent's thread that started this process ends.

    Call it only if that is the parent's main thread, which lives as long as the process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)


def die_with_launcher(environ: Mapping[str, str]) -> None:
    """Be killed when torchrun, wandb's agent, or what has set ENDS_WITH_STARTER ends.

    They start processes from a thread that lives as long as they do.
    """
    if {"TORCHELASTIC_RUN_ID", "WANDB_SWEEP_PARAM_PATH", ENDS_WITH_STARTER} & environ.keys():
        die_with_parent(os.getppid())


def kill_forks_on_exit() -> None:
    """Kill each process forked from now on by the main thread, such as a loader's, when this one ends.

    Children of it do the same. A fork from another thread is left alone, because the kernel kills it as soon
    as that thread ends. Call it once, in the process that forks all others.
    """
    forking: list[int] = []  # this process, while its main thread forks

    def before() -> None:
        forking[:] = [os.getpid()] if threading.current_thread() is threading.main_thread() else []

    def in_child() -> None:
        if forking:
            die_with_parent(forking.pop())

    os.register_at_fork(before=before, after_in_child=in_child)


def kill_children() -> None:
    """Kill the loader processes, before os._exit, which runs no exit handlers. They ignore SIGTERM."""
    for child in multiprocessing.active_children():
        child.kill()


def kill_group(process: int) -> None:
    """Send SIGKILL to a process that leads a process group, and to all that is left of the group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped, by a signal or by a debugger. No process, None, is not."""
    with suppress(OSError):
        # The name before ")" may hold spaces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
