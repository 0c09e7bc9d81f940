"""Sends tensors of rank 0, which alone reads checkpoints, to the other ranks. Reads and writes no file."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from launcher.distributed.collectives import broadcast_bytes
from launcher.distributed.env import RANK0, WorkerEnv
from launcher.engine import async_work

PIECE_BYTES = 16 << 20  # on the device at a time: the memory of a GPU may be full of what is loaded


def broadcast_tensors(env: WorkerEnv, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Rank 0's tensors by name, on the CPU of all ranks; what the others give is ignored. A collective."""
    own = tensors if env.is_leader and tensors is not None else {}
    forms = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.items()}
    told = json.loads(broadcast_bytes(env, json.dumps(forms).encode(), RANK0))
    found = {}
    for name, (dtype, shape) in told.items():
        tensor = own[name].contiguous() if env.is_leader else torch.empty(shape, dtype=getattr(torch, dtype))
        _broadcast(env, tensor)
        found[name] = tensor
    return found


def _broadcast(env: WorkerEnv, tensor: Tensor) -> None:
    """Fill a contiguous tensor of the CPU with rank 0's, piece by piece over the device of the group."""
    if env.group is None or not tensor.numel():
        return
    for piece in torch.split(tensor.reshape(-1).view(torch.uint8), PIECE_BYTES):
        there = piece.to(env.device)
        async_work.broadcast(there, env.group, RANK0)
        if not env.is_leader and there is not piece:
            piece.copy_(there)
