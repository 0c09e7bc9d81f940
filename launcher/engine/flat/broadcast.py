"""Broadcasts the values of rank 0: a collective, called before the first step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import launcher.engine.works as works
from launcher.engine.flat.buffers import Buffers
from launcher.engine.flat.layout import Layout


def take_values_of_rank_0(
    layout: Layout, model: nn.Module, buffers: Buffers, group: dist.ProcessGroup | None
) -> None:
    """Broadcast parameters, including frozen ones, and buffers, bit for bit."""
    if group is None:
        return
    for segment in layout.segments:
        exact = segment.weight if segment.master is None else segment.master
        works.broadcast(exact, group)
    layout.round_weights()
    for p in model.parameters():
        if not p.requires_grad:
            values = p.detach().contiguous()
            whole = values.reshape(-1).view(torch.uint8)  # of any dtype; Gloo has none of 16 bits, for one
            works.broadcast(whole, group)
            p.detach().copy_(values)
    buffers.broadcast()
