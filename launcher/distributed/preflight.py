"""Checks before a job starts: what each rank runs on, and whether all were started the same way.

Owns the facts that must be equal on all ranks and that nothing else would check.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

import torch

from launcher.config.schema import Config, to_dict
from launcher.distributed.env import WorkerEnv
from launcher.errors import PreflightError, counted

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class RankInfo:
    """What a rank runs on."""

    device: str  # in words
    gpu: str | None  # UUID of its CUDA device
    pid: int
    host: str


def exchange_rank_info(config: Config, env: WorkerEnv, store: dist.Store | None, job: str) -> list[RankInfo]:
    """What each rank runs on, in rank order. All ranks call it; the store waits for late ones.

    Raises PreflightError, on all ranks, unless all were started the same way.
    """
    device, gpu = f"CPU {platform.machine()}, {counted(torch.get_num_threads(), 'thread')}", None
    if env.device.type == "cuda":
        card = torch.cuda.get_device_properties(env.device)
        device, gpu = card.name, str(card.uuid)
    own = RankInfo(device, gpu, os.getpid(), gethostname())
    if store is None:
        return [own]
    store.set(
        f"{job}/meeting/{env.rank}", json.dumps({"peer": asdict(own), "facts": environment_facts(config)})
    )
    said = [json.loads(store.get(f"{job}/meeting/{rank}")) for rank in range(env.world_size)]
    refuse_differences([words["facts"] for words in said])
    return [RankInfo(**words["peer"]) for words in said]


def environment_facts(config: Config) -> dict[str, str]:
    """What must be equal on all ranks: versions, and digests of the config, of a recipe file, of our own."""
    recipe = Path(config.recipes.path).read_bytes() if config.recipes.path else b""
    own = sorted(Path(__file__).parents[1].rglob("*.py"))
    has_gpu = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the seed": str(config.seed),
        "the digest of the config": _digest(json.dumps(to_dict(config), sort_keys=True).encode()),
        "the digest of the recipe file": _digest(recipe),
        "the digest of the launcher's files": _digest(b"".join(file.read_bytes() for file in own)),
        "NCCL": str(torch.cuda.nccl.version() if has_gpu else None),  # type: ignore[no-untyped-call]
    }


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
            "installation, with the same files and arguments."
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
