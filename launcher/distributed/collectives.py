"""Collectives on texts and bytes, and gathers of numbers; sums over the ranks are those of `engine.works`.

All ranks call each function at the same point; `group` None is one process. Nothing is unpickled here.
Works are kept as in the engine: dropping one can abort the process at shutdown.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.works as works
from launcher.distributed.env import WorkerEnv


def exchange_texts(env: WorkerEnv, text: str) -> list[str]:
    """The `text` of each rank, by rank. A collective; bytes only, nothing is unpickled."""
    if env.group is None:
        return [text]
    data = text.encode(errors="surrogatepass")  # all ranks get the text that a single one would
    # Lengths first: a gather needs equal sizes, so all texts are padded to the longest.
    lengths = gather(torch.tensor([len(data)], device=env.device), env.group)
    longest = max(int(length) for length in lengths)
    padded = bytearray(data.ljust(longest + 1))  # at least one byte: an empty buffer is refused
    rows = gather(torch.frombuffer(padded, dtype=torch.uint8).to(env.device), env.group)
    pairs = zip(rows, lengths, strict=True)
    return [
        row.cpu().numpy().tobytes()[: int(length)].decode(errors="surrogatepass") for row, length in pairs
    ]


def send_to_all(env: WorkerEnv, data: bytes, sender: int) -> bytes:
    """`data` of the rank `sender`; that of the other ranks is ignored. A collective."""
    if env.group is None:
        return data
    length = torch.tensor([len(data)], device=env.device)
    # The length first: the other ranks have to know how many bytes they receive.
    works.broadcast(length, env.group, sender)
    content = torch.zeros(int(length) + 1, dtype=torch.uint8, device=env.device)  # an empty one is refused
    if env.rank == sender:
        content[:-1] = torch.frombuffer(bytearray(data + b"."), dtype=torch.uint8)[:-1].to(env.device)
    works.broadcast(content, env.group, sender)
    return content[:-1].cpu().numpy().tobytes()


def gather(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """`own` of each rank, by rank: tensors of one shape and dtype, on its device."""
    if group is None:
        return [own]
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    works.run(dist.all_gather(rows, own, group=group, async_op=True), own)
    return rows
