"""Checks of a machine that need no GPU: versions, cores, memory, limits, disk, interface, tracker.

Owns their thresholds. Imports no torch.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from launcher.config.schema import Config
from launcher.distributed.env import WorkerEnv
from launcher.distributed.nccl import INTERFACES, shm_hint
from launcher.doctor.findings import FAILURE, WARNING, Check, Finding, judged
from launcher.errors import counted
from launcher.run_dir.claim import DEFAULT_ROOT
from launcher.telemetry.tracker.mode import decide

GB = 1e9
MIN_FREE_BYTES = 1 << 30  # a ResNet-50 with SGD and momentum takes 0.3 GB a checkpoint, and two are kept
SLOW_DISK = 50e6  # bytes per second: a laptop's disk of 2010
PROBE_BYTES = 64 << 20
FEW_FILES = 1024  # the usual soft limit; loader processes share tensors by descriptors
RANK_BYTES = 1 << 30  # torch, its libraries and a small model
INFINIBAND = "/sys/class/infiniband"


@dataclass(frozen=True)
class Subject:
    """What a run would use of this machine."""

    config: Config
    ranks: int
    gpus: int

    @property
    def place(self) -> Path:
        return existing_part_of_run_dir(self.config)


def existing_part_of_run_dir(config: Config) -> Path:
    """What exists of the path to the run's directory. It may be a file: then no run can be there."""
    path = Path(os.path.expanduser(config.run.dir or DEFAULT_ROOT)).absolute()
    # Not Path.exists, which raises below a folder that this user may not enter.
    return next((each for each in (path, *path.parents) if os.path.exists(each)), Path("/"))


def checks(subject: Subject) -> list[Check]:
    """All checks of this file, in the order in which they are printed."""
    return [
        Check("versions", versions),
        Check("CPU", lambda: cores(subject)),
        Check("memory", lambda: memory(subject)),
        Check("shared memory", lambda: shared_memory(subject)),
        Check("limits", limits),
        Check("disk", lambda: disk(subject.place), 60.0, "The disk of run.dir hangs: choose another place."),
        Check("interface", lambda: interface(os.environ), 10.0, "The name of this host cannot be resolved."),
        Check("tracker", lambda: tracker(subject.config, os.environ)),
    ]


def warn_of_machine(config: Config, env: WorkerEnv) -> None:
    """Warn of what is wrong with this host, of that which can be looked at in some milliseconds.

    One rank of each host looks.
    """
    if env.local_rank > 0:
        return
    subject = Subject(config, env.local_world_size, env.local_world_size if env.device.type == "cuda" else 0)
    for look in (cores, memory, shared_memory, lambda _: limits(), free_space):
        with suppress(OSError, ValueError, LookupError):  # a machine without /proc/meminfo trains as well
            for finding in look(subject):
                if finding.advice:
                    warnings.warn(finding.sentence, stacklevel=1)


def versions() -> Iterator[Finding]:
    yield Finding("Python", platform.python_version())
    for name in ("torch", "hydra-core", "wandb"):
        yield Finding(name, metadata.version(name))


def cores(subject: Subject) -> Iterator[Finding]:
    count, allowed, advice = len(os.sched_getaffinity(0)), quota(), ""
    value = f"{counted(count, 'core')} for {counted(subject.ranks, 'rank')}"
    if allowed is not None and allowed < count - 0.5:
        value += f", of which the container may use {allowed:.1f}"
        threads = max(1, int(allowed / subject.ranks))
        advice = f"Threads beyond that are stopped in turn: set OMP_NUM_THREADS={threads}"
        advice += ", or raise the container's CPU limit."
    elif count < subject.ranks:
        advice = "Ranks wait for each other's core: start fewer, or bind them to more cores."
    yield judged("CPU", value, advice)


def quota(path: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    """The cores that the cgroup allows at once; None without a limit."""
    with suppress(OSError, ValueError):
        allowed, period = Path(path).read_text().split()
        return int(allowed) / int(period)
    return None


def memory(subject: Subject) -> Iterator[Finding]:
    available = available_bytes()
    each = available / subject.ranks
    few = f"A rank takes about {RANK_BYTES / GB:.0f} GB without its data: start fewer, or end other programs."
    value = f"{available / GB:.1f} GB free, {each / GB:.1f} a rank"
    yield judged("memory", value, few if each < RANK_BYTES else "")


def available_bytes() -> int:
    """Memory of the host that programs can still have: free, or filled with files that can be read again."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def shared_memory(subject: Subject) -> Iterator[Finding]:
    little = shm_hint()
    free = "" if little else f"{shutil.disk_usage('/dev/shm').free / GB:.1f} GB in /dev/shm"
    value = free or "/dev/shm is missing or small"
    yield judged("shared memory", value, little, FAILURE if min(subject.gpus, subject.ranks) > 1 else WARNING)


def limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = most if most > 0 else 65536
    few = f"Loader processes may fail: ulimit -n {more}."
    if files == most:
        few = "Loader processes may fail: raise nofile in limits.conf (docker: --ulimit nofile=65536)."
    yield judged("open files", f"at most {files}", few if 0 <= files < FEW_FILES else "")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    needed = any(Path(INFINIBAND).glob("*")) and not unlimited
    advice = "NCCL registers memory with InfiniBand: ulimit -l unlimited (docker: --ulimit memlock=-1)."
    value = "unlimited" if unlimited else f"at most {locked >> 20} MB"
    yield judged("locked memory", value, advice if needed else "", FAILURE)


def free_space(subject: Subject) -> Iterator[Finding]:
    yield _space(subject.place, "")


def _space(place: Path, rate: str, advice: str = "") -> Finding:
    free = shutil.disk_usage(place).free
    little = "Make room, or choose run.dir elsewhere." if free < MIN_FREE_BYTES else ""
    return judged("disk", f"{free / GB:.1f} GB free{rate} at {place}", little or advice)


def disk(place: Path) -> Iterator[Finding]:
    """Free space, and the rate at which a checkpoint is written; leaves nothing."""
    block, began = os.urandom(1 << 20), time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = PROBE_BYTES / (time.perf_counter() - began)
    except OSError as error:
        advice = "Runs cannot save there: make room, or choose run.dir elsewhere."
        yield judged("disk", f"{place}: {error.strerror}", advice, FAILURE)
        return
    slow = "Checkpoints take long: choose a faster disk, or a larger checkpoint.every_s."
    yield _space(place, f", {rate / 1e6:.0f} MB/s written", slow if rate < SLOW_DISK else "")


def interface(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The address by which Gloo and NCCL tell other machines to reach this one."""
    host, names = socket.gethostname(), [name for _, name in socket.if_nameindex() if name != "lo"]
    address = socket.gethostbyname(host)
    is_loopback = address.startswith("127.") and not environ.get(INTERFACES[0])
    advice = f"For runs on several machines set {' and '.join(INTERFACES)}: {', '.join(names)}."
    yield judged("interface", f"{host} is {address}", advice if names and is_loopback else "")


def tracker(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    if "wandb" not in config.tracker.names:
        yield Finding("tracker", ", ".join(config.tracker.names) or "none")
        return
    mode = decide(config.tracker, environ)
    unasked = mode.mode == "offline" and "mode=" not in mode.reason.lower()
    advice = "Runs are recorded on disk, and can be uploaded later." if unasked else ""
    yield judged("tracker", f"wandb {mode.text}", advice)
