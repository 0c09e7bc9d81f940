"""This process's place in the job: rank, world size, device, process group.

Owns every read of RANK and related variables. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.errors import listed

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

RANKS_SHOWN = 16  # in an error, which may be about thousands
NODE = "node"  # LaunchEnv.role
RANK0 = 0  # the rank that writes files, and has what is gathered for them


@dataclass(frozen=True)
class LaunchEnv:
    """This process according to torchrun, or a scheduler that sets the same variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
    run_id: str = "none"
    has_external_launcher: bool = False  # torchrun or a scheduler started this process as a rank: RANK is set
    role: str = "rank"  # or "node": this process is the parent on one of several machines
    micro_batch: int | None = None  # the micro-batch with which the parent has restarted a run out of memory

    @property
    def name(self) -> str:
        """This process in messages: `rank 1`, `node 1`."""
        return f"{self.role} {self.rank}"

    @property
    def is_node(self) -> bool:
        """Whether this process is the parent on one of several machines."""
        return self.role == NODE

    @property
    def num_machines(self) -> int:
        return self.world_size if self.is_node else -(-self.world_size // self.local_world_size)

    @property
    def endpoint(self) -> str:
        """Where the processes of this launch meet, as part of a sentence."""
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if self.is_node:
            return f"launch.rdzv_endpoint={address}:{port}"
        return f"MASTER_ADDR={address} and MASTER_PORT={port}"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> LaunchEnv:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, ...; without RANK this process is alone.

        Raises KeyError or ValueError for one that is missing or no number.
        """
        if "RANK" not in environ:
            # RANK alone decides, whatever else a scheduler has set.
            return cls()
        return cls(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", 0)),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
            restart_count=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            run_id=environ.get("TORCHELASTIC_RUN_ID", "none"),
            has_external_launcher=True,
        )


@dataclass(frozen=True)
class WorkerEnv:
    """One rank's place in a running job. `group` is None for a job of one process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def is_rank0(self) -> bool:
        """Whether this rank writes files and console output. Never a reason to skip a collective."""
        return self.rank == RANK0


def format_ranks(ranks: Sequence[int], role: str = "rank") -> str:
    """The ranks as part of a sentence: `rank 1, 3`."""
    return f"{role} {listed(ranks, RANKS_SHOWN)}"
