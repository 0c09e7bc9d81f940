"""Texts and numbers of all ranks, by rank: the gathers that are not of gradients.

Every function is a collective: all ranks call it at the same point. Bytes only, nothing is unpickled.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.distributed.process_group import WorkerEnv


def exchange_texts(env: WorkerEnv, text: str) -> list[str]:
    """What each rank says, by rank. A collective; bytes only, nothing is unpickled."""
    if env.group is None:
        return [text]
    data = text.encode()
    lengths = _gather(env, torch.tensor([len(data)], device=env.device))
    longest = max(int(length) for length in lengths)
    padded = bytearray(data.ljust(longest + 1))  # at least one byte: an empty buffer is refused
    rows = _gather(env, torch.frombuffer(padded, dtype=torch.uint8).to(env.device))
    pairs = zip(rows, lengths, strict=True)
    return [row.cpu().numpy().tobytes()[: int(length)].decode() for row, length in pairs]


def _gather(env: WorkerEnv, own: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(own) for _ in range(env.world_size)]
    dist.all_gather(rows, own, group=env.group)
    return rows
