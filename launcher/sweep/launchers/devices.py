"""The launcher for the devices of this machine: each job in a process of its own, forked from this one.

Owns which GPUs and cores a job gets. A job gets its GPUs by UUID, so that no other order of devices can
mix them up; on a CPU the cores are shared out among the jobs that run at a time. The forked process has torch
imported already, leads a session of its own, and is killed with this one. This process never touches a GPU.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from launcher.launch.worker_count import visible_gpus
from launcher.os.lifetime import die_with_parent, kill_group
from launcher.os.signals import reset_handlers, signals_blocked
from launcher.sweep.launchers import JobEvent, JobLauncher
from launcher.sweep.progress import LOG
from launcher.sweep.state import SweepJob

# From one look at the children to the next: at most this long a device is idle. pidfds would need Linux 5.3.
LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class DevicePool:
    """The devices to share out. Without GPUs, `shares` jobs at a time get a share of the cores each."""

    gpus: Sequence[str]  # UUIDs
    cores: Sequence[int]
    per_gpu: int = 1  # jobs that share a GPU
    shares: int | None = None  # jobs at a time; None: as many as fit

    def at_a_time(self, nproc: int) -> int:
        """How many jobs of so many workers run at a time."""
        fit = len(self.gpus) * self.per_gpu // nproc if self.gpus else self.shares or 1
        return max(1, min(fit, self.shares or fit))

    def cores_of(self, part: int, parts: int) -> list[int]:
        """The cores of one of so many equal parts; a core is shared where there are more parts."""
        first, last = (len(self.cores) * number // parts for number in (part, part + 1))
        return [*self.cores[first:last]] or [self.cores[first % len(self.cores)]]


class DeviceLauncher(JobLauncher):
    """Runs jobs on the devices of a pool. `run` runs the job in a folder and returns its exit code."""

    def __init__(self, pool: DevicePool, run: Callable[[Path], int], alone: bool) -> None:
        self._pool, self._run, self._alone = pool, run, alone
        self._parent = os.getpid()
        self._children: dict[int, int] = {}  # process ids, by number of the job
        self._parts: dict[int, list[int]] = {}  # of the pool: GPUs or shares, likewise

    def has_capacity(self, job: SweepJob) -> bool:
        return self._parts_for(job) is not None

    def submit(self, job: SweepJob, directory: Path) -> None:
        parts = self._parts_for(job)
        assert parts is not None
        self._parts[job.number] = parts
        gpus = [self._pool.gpus[part] for part in parts] if self._pool.gpus else []
        cores = [core for part in parts for core in self._pool.cores_of(part, self._num_parts)]
        job.devices = gpus or [f"core {core}" for core in cores]
        sys.stdout.flush()  # else the child would print it again
        sys.stderr.flush()
        with signals_blocked():
            child = os.fork()
            if child == 0:
                self._be_the_job(directory, gpus, cores)
        self._children[job.number] = child

    def poll(self, wait_s: float) -> Sequence[JobEvent]:
        deadline = time.monotonic() + wait_s
        while not (changes := [*self._ended()]) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        return changes

    def stop(self, job: SweepJob, at_once: bool = False) -> None:
        self._send(job, signal.SIGKILL if at_once else signal.SIGTERM)

    def save(self, job: SweepJob) -> None:
        self._send(job, signal.SIGUSR1)

    def __exit__(self, *error: object) -> None:
        for child in self._children.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._children.clear()

    def _send(self, job: SweepJob, number: signal.Signals) -> None:
        os.kill(self._children[job.number], number)  # it is not reaped yet: no other process has its id

    @property
    def _num_parts(self) -> int:
        return len(self._pool.gpus) or self._pool.shares or 1

    def _parts_for(self, job: SweepJob) -> list[int] | None:
        """The least used GPUs, or a free share of the cores; None where there are too few."""
        if len(self._parts) >= (self._pool.shares or len(self._pool.gpus) * self._pool.per_gpu or 1):
            return None
        used = Counter(itertools.chain.from_iterable(self._parts.values()))
        per_part, wanted = (self._pool.per_gpu, job.nproc) if self._pool.gpus else (1, 1)
        free = [part for part in range(self._num_parts) if used[part] < per_part]
        free.sort(key=used.__getitem__)
        return sorted(free[:wanted]) if len(free) >= wanted else None

    def _ended(self) -> Sequence[JobEvent]:
        found = []
        for job, child in [*self._children.items()]:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid == child:
                del self._children[job], self._parts[job]
                kill_group(child)  # what its recipe has started and left
                code = os.waitstatus_to_exitcode(status)
                reason = "" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
                found.append(JobEvent(job, code if code >= 0 else 128 - code, reason))
        return found

    def _be_the_job(self, directory: Path, gpus: Sequence[str], cores: Sequence[int]) -> NoReturn:
        """Run the job in this process, just forked, and exit with its code."""
        code = 1
        try:
            os.setsid()  # a Ctrl-C is for the sweep, which stops its jobs
            die_with_parent(self._parent)
            reset_handlers()
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
                visible_gpus.cache_clear()
            with suppress(OSError):  # cores that a container has taken away meanwhile
                os.sched_setaffinity(0, cores)
            if not self._alone:
                output = os.open(directory / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
            code = self._run(directory)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # the rest of this program is the parent's
