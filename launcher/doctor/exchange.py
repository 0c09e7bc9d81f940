"""What ranks do to test the links between them. Run as a program, one process a rank, it tests one machine.

    python -m launcher.doctor.exchange RANK WORLD_SIZE FILE SECONDS DEVICE ...

FILE is where the ranks meet; DEVICE, one for each rank, is `cpu` or `cuda:N`. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from launcher.distributed.links import ring_bytes
from launcher.engine.params.flat_params import MAX_BUCKET_BYTES
from launcher.os.lifetime import die_with_launcher

COPIED_BYTES = 64 << 20
KNOWN = 1 << 20  # elements whose sum is compared
WARM_UP = 2  # exchanges; the first opens connections
MOST = 2000  # exchanges
PRODUCTS = 50  # of matrices


def exchange(rank: int, world_size: int, device: torch.device, seconds: float) -> dict[str, Any]:
    """All-reduce known values, then messages of the largest size that a step sends, for some seconds.

    `summed`: whether every element is right on all ranks. `bytes_per_s`: over each link of a ring, as the bus
    bandwidth of nccl-tests, 2 (n - 1) / n of a message. All ranks of the default group call it.
    """
    numbers = torch.arange(KNOWN, dtype=torch.int32, device=device)
    found = numbers * (rank + 1)
    dist.all_reduce(found)
    # int32, which wraps around on both sides in the same way: exact for any number of ranks.
    wrong = (found != numbers * (world_size * (world_size + 1) // 2)).sum()
    dist.all_reduce(wrong)
    message = torch.zeros(MAX_BUCKET_BYTES // 2, dtype=torch.float16, device=device)
    for _ in range(WARM_UP):
        one_s = _timed(message, 1)
    count = torch.tensor([min(MOST, max(1, int(seconds / one_s)))], device=device)
    dist.broadcast(count, 0)  # all ranks exchange equally often
    volume = ring_bytes(message.nbytes, world_size) * int(count)
    return {"summed": not int(wrong), "bytes_per_s": volume / _timed(message, int(count))}


def _timed(message: torch.Tensor, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(message)
    if message.is_cuda:
        torch.cuda.synchronize(message.device)
    return time.perf_counter() - began


def speeds(rank: int, world_size: int, device: torch.device) -> list[float]:
    """Matrix products per second of each rank, all at once. All ranks of the default group call it."""
    size, dtype = (4096, torch.float16) if device.type == "cuda" else (512, torch.float32)
    matrix = torch.zeros(size, size, dtype=dtype, device=device)
    found = torch.zeros(world_size, dtype=torch.float64, device=device)
    for _ in range(2):  # the first starts the library
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            matrix @ matrix
        if matrix.is_cuda:
            torch.cuda.synchronize(device)
        found[rank] = PRODUCTS / (time.perf_counter() - began)
    dist.all_reduce(found)
    return found.tolist()


def copies(devices: list[torch.device]) -> bool:
    """Whether random bytes are the same after a copy from each of the GPUs to each other one."""
    for source, target in itertools.permutations(devices, 2):
        sent = torch.randint(0, 256, (COPIED_BYTES,), dtype=torch.uint8, device=source)
        if not torch.equal(sent.to(target).cpu(), sent.cpu()):
            return False
    return True


def main(rank: int, world_size: int, file: str, seconds: float, devices: list[torch.device]) -> None:
    own = devices[rank]
    is_gpu = own.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(own)
    meet("nccl" if is_gpu else "gloo", file, rank, world_size)
    copied = not is_gpu or rank > 0 or copies(devices)
    found = exchange(rank, world_size, own, seconds) | {"copied": copied}
    found["speeds"] = speeds(rank, world_size, own)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found), flush=True)


def meet(backend: str, file: str, rank: int, world_size: int) -> None:
    """Make the default group of ranks that share a file."""
    store = dist.FileStore(file, world_size)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


if __name__ == "__main__":
    die_with_launcher(os.environ)
    rank, world_size, file, seconds, *devices = sys.argv[1:]
    main(int(rank), int(world_size), file, float(seconds), [*map(torch.device, devices)])
