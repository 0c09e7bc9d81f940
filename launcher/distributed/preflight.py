"""Checks before a job starts: what each rank runs on, and whether all were started the same way.

Owns the facts that must be equal on all ranks and that nothing else would check.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import gethostname
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import torch

from launcher.config.schema import Config, to_dict
from launcher.distributed.env import LaunchEnv, WorkerEnv, numbered
from launcher.errors import PreflightError, counted
from launcher.run_dir.atomic import failing_as_storage_error

if TYPE_CHECKING:
    import torch.distributed as dist


CLOCK_S = 60.0  # by which the clocks of two machines may differ
SEEN_S = 5.0  # until a new file is seen on all machines: a network file system may show it late


@dataclass(frozen=True)
class Peer:
    """What a rank runs on."""

    device: str  # in words
    gpu: str | None  # UUID of its CUDA device
    pid: int
    host: str


def meet(config: Config, env: WorkerEnv, store: dist.Store | None, job: str) -> list[Peer]:
    """What each rank runs on, in rank order. All ranks call it; the store waits for late ones.

    Raises PreflightError, on all ranks, unless all were started the same way.
    """
    device, gpu = f"CPU {platform.machine()}, {counted(torch.get_num_threads(), 'thread')}", None
    if env.device.type == "cuda":
        card = torch.cuda.get_device_properties(env.device)
        device, gpu = card.name, str(card.uuid)
    own = Peer(device, gpu, os.getpid(), gethostname())
    if store is None:
        return [own]
    words: dict[str, object] = {"peer": asdict(own), "facts": facts(config)}
    alike = config.launch.hosts == "alike"
    makes_mark = alike and env.is_leader and config.run.dir
    with mark(config.run.dir) if makes_mark else nullcontext("") as made:
        if alike and not env.is_leader:
            words["sees"] = sees(json.loads(store.get(f"{job}/meeting/0"))["mark"])
        store.set(f"{job}/meeting/{env.rank}", json.dumps(words | {"mark": made}))
        said = [json.loads(store.get(f"{job}/meeting/{rank}")) for rank in range(env.world_size)]
    refuse_differences([words["facts"] for words in said])
    blind = [rank for rank, words in enumerate(said) if not words.get("sees", True)]
    if blind:
        raise _own_disk(config, blind, said[blind[0]]["peer"]["host"])
    if alike:
        _refuse_other_clock(env, store, job)
    return [Peer(**words["peer"]) for words in said]


def prepare_directory(config: Config, launch: LaunchEnv) -> Path:
    """The run's directory on this machine; made under launch.hosts=mixed, for files of its ranks.

    Raises PreflightError where it is not there although rank 0 has made it, StorageError where it cannot be
    made.
    """
    directory = Path(config.run.dir)
    if config.launch.hosts == "alike" and not sees(config.run.dir):
        raise _own_disk(config, [launch.rank], gethostname())
    what = f"rank {launch.rank}: run.dir={directory} cannot be made on {gethostname()}"
    with failing_as_storage_error(what, "Choose one that all machines can write."):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def facts(config: Config) -> dict[str, str]:
    """What must be equal on all ranks: versions, and digests of the config and of a recipe file.

    launch.hosts=alike demands more of all machines.
    """
    recipe = Path(config.recipes.path).read_bytes() if config.recipes.path else b""
    found = {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the seed": str(config.seed),
        "the digest of the config": _digest(json.dumps(to_dict(config), sort_keys=True).encode()),
        "the digest of the recipe file": _digest(recipe),
    }
    if config.launch.hosts == "alike":
        files = sorted(Path(__file__).parents[1].rglob("*.py"))  # of the launcher
        found["the digest of the launcher's files"] = _digest(b"".join(file.read_bytes() for file in files))
        found["the number of GPUs"] = str(torch.cuda.device_count())
        has_gpu = torch.cuda.is_available()
        found["NCCL"] = str(torch.cuda.nccl.version() if has_gpu else None)  # type: ignore[no-untyped-call]
    return found


@contextmanager
def mark(directory: str | Path) -> Iterator[str]:
    """The path of a new file that is in the directory within the context; empty where none can be made."""
    with ExitStack() as made:
        path = ""
        with suppress(OSError):  # of a directory that cannot be written, which the run reports later
            path = made.enter_context(NamedTemporaryFile(prefix=".meeting-", dir=directory)).name
        yield path


def sees(path: str) -> bool:
    """Whether this machine sees what rank 0 has made."""
    deadline = time.monotonic() + SEEN_S
    while path and not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _own_disk(config: Config, ranks: list[int], host: str) -> PreflightError:
    """The error of ranks that do not see the directory in which rank 0 writes the checkpoints."""
    return PreflightError(
        f"{numbered(ranks)} (on {host}) does not see rank 0's run.dir={config.run.dir}, where the "
        "checkpoints are: a run whose rank 0 is on that machine after a restart would begin anew. Give a "
        "run.dir on a file system that all machines share. launch.hosts=mixed allows machines with disks of "
        "their own: rank 0 sends them its checkpoint, and must then always be on the same machine."
    )


def _refuse_other_clock(env: WorkerEnv, store: dist.Store, job: str) -> None:
    """Raise PreflightError if this clock is not that of rank 0. All ranks have just read the same keys."""
    key = f"{job}/clock"
    if env.is_leader:
        store.set(key, str(time.time()))
        return
    # Read as soon as it is set: late ranks have delayed rank 0 as well.
    ahead_s = time.time() - float(store.get(key))
    if abs(ahead_s) > CLOCK_S:
        raise PreflightError(
            f"rank {env.rank}: the clock of this machine ({gethostname()}) is {abs(ahead_s):.0f} s "
            f"{'ahead of' if ahead_s > 0 else 'behind'} that of rank 0's. Set the clocks (NTP), or allow the "
            "difference with launch.hosts=mixed."
        )


def refuse_differences(by_rank: list[dict[str, str]]) -> None:
    """Raise PreflightError unless all ranks have the facts of rank 0."""
    first = by_rank[0]
    lines = [
        f"rank {rank}: {key} is {value}, and {first[key]} on rank 0"
        for rank, own in enumerate(by_rank)
        for key, value in own.items()
        if value != first[key]
    ]
    if lines:
        raise PreflightError(
            f"the ranks were not started alike: {'; '.join(lines)}. Start all of them from the same "
            "installation, with the same files and arguments; launch.hosts=mixed allows machines with "
            "another launcher, NCCL or number of GPUs."
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
