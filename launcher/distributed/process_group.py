"""Joins a job as one rank: the device, the threads and the process group.

Owns the choice of device, the division of threads, and the lifetime of the process group. Importing it
imports no torch, so that a bad config is refused before torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.distributed import nccl
from launcher.distributed.env import LaunchEnv, WorkerEnv
from launcher.errors import PreflightError, described
from launcher.os.cuda_driver import refuse_missing_kernels, refuse_unusable_driver

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# torch wants a number. The hang timer ends a rank without progress, and knows whose fault it is.
UNLIMITED_S = 365 * 24 * 3600.0


@contextmanager
def join(launch: LaunchEnv, store: dist.Store | None, job: str, timeout_s: float) -> Iterator[WorkerEnv]:
    """Join a job as one rank: bind the device, divide threads, open the process group; always close it.

    `timeout_s` is the longest wait until all ranks have opened it. No collective has a timeout after that:
    `hang_timer` or the parent end a rank that makes no progress, and know whom it waits for.
    """
    import torch.distributed as dist

    device = _device(launch)
    refuse_unusable_driver(launch.rank, device)
    refuse_missing_kernels(launch.rank, device)
    divide_threads(launch.local_world_size)
    places = launch.rank, launch.world_size, launch.local_rank, launch.local_world_size
    if store is None:
        yield WorkerEnv(*places, device, None)
        return
    # Before the group is opened: NCCL and Gloo read the environment when they start.
    nccl.prepare(os.environ, one_machine=launch.local_world_size == launch.world_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        # A fresh prefix per job: a second group in one launch would otherwise read the first one's keys.
        store=dist.PrefixStore(f"group/{job}", store),
        rank=launch.rank,
        world_size=launch.world_size,
        # The hang timer, which names a phase, comes first.
        timeout=timedelta(seconds=timeout_s + 10),
        # Opens NCCL's communicator now, on this device, instead of within the first collective.
        device_id=device if device.type == "cuda" else None,
    )
    try:
        # torch 2.14 made it public and warns about the old name.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=UNLIMITED_S), dist.group.WORLD)
        yield WorkerEnv(*places, device, dist.group.WORLD)
    except BaseException as error:
        _close_after(error, device)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _close_after(error: BaseException, device: torch.device) -> None:
    """Close the group of a rank that fails. What that raises is noted on the error and does not replace it.

    After an error of CUDA every further call of it fails, those that close the group among them.
    """
    import torch.distributed as dist

    # Others may wait in a collective that this rank will never join: a clean shutdown over NCCL would hang.
    abort = dist.distributed_c10d._abort_process_group
    try:
        if dist.is_initialized():
            abort() if device.type == "cuda" else dist.destroy_process_group()
    except Exception as another:
        error.add_note(f"Its process group could not be closed either: {described(another)}")


def _device(launch: LaunchEnv) -> torch.device:
    """GPU number `local_rank` of the visible ones, or the only one if a scheduler shows each task its own."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count > 1:
        raise PreflightError(
            f"rank {launch.rank} is number {launch.local_rank} on this machine, which has {count} GPUs. "
            f"Start at most {count} processes per machine (torchrun --nproc-per-node={count})."
        )
    device = torch.device("cuda", launch.local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def divide_threads(ranks: int) -> None:
    """Share the cores among so many ranks of this machine, unless the user has set OMP_NUM_THREADS."""
    import torch

    if not user_omp_threads():
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def user_omp_threads() -> str:
    """OMP_NUM_THREADS, if it is the user's own; else empty.

    torchrun sets it to 1 for its workers if it is unset. What torchrun itself was started with is in /proc.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return given
    try:
        inherited = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return given if b"OMP_NUM_THREADS=1" in inherited else ""
