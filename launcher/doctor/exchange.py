"""What ranks do to test the links between them. Run as a program it starts them on one machine.

    python -m launcher.doctor.exchange SECONDS DEVICE ...

DEVICE, one for each rank, is `cpu` or `cuda:N`. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing

from launcher.distributed.links import ring_bytes
from launcher.engine.flat.layout import MAX_RUN_BYTES
from launcher.process.lifetime import ParentDeathSignal, end_with_starter

COPIED_BYTES = 64 << 20
KNOWN = 1 << 20  # elements whose sum is compared
WARM_UP = 2  # exchanges; the first opens connections
MOST = 2000  # exchanges


@dataclass(frozen=True)
class Exchanged:
    copied: bool  # bytes arrived as they were sent, both ways
    summed: bool  # on all ranks, every element
    bytes_per_s: float  # over each link of a ring, as nccl-tests' bus bandwidth: 2 (n - 1) / n of a message
    cpu_s_per_byte: float  # of this process's time, over what it sends


def exchange(rank: int, world_size: int, device: torch.device, seconds: float) -> Exchanged:
    """All-reduce known values, then messages of the largest size that a step sends, for some seconds.

    All ranks of the default group call it.
    """
    numbers = torch.arange(KNOWN, dtype=torch.int32, device=device)
    found = numbers * (rank + 1)
    dist.all_reduce(found)
    # int32, which wraps around on both sides in the same way: exact for any number of ranks.
    wrong = (found != numbers * (world_size * (world_size + 1) // 2)).sum()
    dist.all_reduce(wrong)
    message = torch.zeros(MAX_RUN_BYTES // 2, dtype=torch.float16, device=device)
    for _ in range(WARM_UP):
        one_s = _timed(message, 1)
    count = torch.tensor([min(MOST, max(1, int(seconds / one_s)))], device=device)
    dist.broadcast(count, 0)  # all ranks exchange equally often
    cpu_s = time.process_time()
    took_s = _timed(message, int(count))
    cpu_s = time.process_time() - cpu_s
    volume = ring_bytes(message.nbytes, world_size) * int(count)
    return Exchanged(True, not int(wrong), volume / took_s, cpu_s / volume)


def _timed(message: torch.Tensor, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(message)
    if message.is_cuda:
        torch.cuda.synchronize(message.device)
    return time.perf_counter() - began


def copies(devices: Sequence[torch.device]) -> bool:
    """Whether random bytes are the same after a copy from each of the GPUs to each other one."""
    for source in devices:
        sent = torch.randint(0, 256, (COPIED_BYTES,), dtype=torch.uint8, device=source)
        for target in devices:
            if target != source and not torch.equal(sent.to(target).cpu(), sent.cpu()):
                return False
    return True


def be_a_rank(rank: int, store: int, seconds: float, devices: Sequence[torch.device]) -> None:
    """One rank of the program. `store` is the descriptor of the file in which the ranks meet."""
    own, world_size = devices[rank], len(devices)
    is_gpu = own.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(own)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=dist.FileStore(f"/proc/self/fd/{store}"),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    copied = not is_gpu or rank > 0 or copies(devices)
    found = exchange(rank, world_size, own, seconds)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(dataclasses.asdict(dataclasses.replace(found, copied=copied))), flush=True)


def main(seconds: str, *devices: str) -> None:
    end_with_starter(os.environ)
    ParentDeathSignal()  # a rank that hangs is killed with this program, at its time limit
    ranks = (os.memfd_create("doctor-store"), float(seconds), [*map(torch.device, devices)])
    start = torch.multiprocessing.start_processes
    start(be_a_rank, ranks, nprocs=len(devices), start_method="fork")  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(*sys.argv[1:])
