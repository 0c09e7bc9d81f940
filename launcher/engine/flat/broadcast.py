"""Checks that all ranks hold the same tensors, and broadcasts the values of rank 0.

Every function is a collective, called before the first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import launcher.engine.works as works
from launcher.engine.errors import UnusableError
from launcher.engine.flat.buffers import Buffers
from launcher.engine.flat.groups import ParameterGroup
from launcher.engine.flat.layout import Layout
from launcher.engine.flat.names import named_buffers, named_parameters


def refuse_different_models(
    model: nn.Module,
    reference_count: int | None,
    groups: Sequence[ParameterGroup],
    group: dist.ProcessGroup | None,
) -> None:
    """Require the same tensors in the same order, reference count and groups on all ranks.

    Raises UnusableError on all ranks or on none.
    """
    if group is None:
        return
    tensors = [*named_parameters(model).items(), *named_buffers(model).items()]
    lines = [f"{n} {tuple(t.shape)} {t.stride()} {t.dtype} {t.requires_grad}" for n, t in tensors]
    lines.append(f"reference_count {reference_count}, groups {list(groups)}")
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "little")
    device = tensors[0][1].device if tensors else None
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    works.run(dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group, async_op=True), both)
    if both[0] != -both[1]:
        raise UnusableError(
            "the ranks hold different parameters or buffers (names, shapes, strides, dtypes, requires_grad "
            "or order), or were given different reference counts or parameter groups. Build the same model "
            f"on all ranks. Rank {dist.get_rank(group)} has {len(tensors)} tensors, the first is "
            f"{lines[0] if tensors else 'none'}. Its reference count is {reference_count}."
        )


def take_values_of_rank_0(
    layout: Layout, model: nn.Module, buffers: Buffers, group: dist.ProcessGroup | None
) -> None:
    """Broadcast parameters, including frozen ones, and buffers, bit for bit."""
    if group is None:
        return
    for segment in layout.segments:
        exact = segment.weight if segment.master is None else segment.master
        works.run(dist.broadcast(exact, group=group, group_src=0, async_op=True), exact)
    layout.round_weights()
    for p in model.parameters():
        if not p.requires_grad:
            values = p.detach().contiguous()
            whole = values.reshape(-1).view(torch.uint8)  # of any dtype; Gloo has none of 16 bits, for one
            works.run(dist.broadcast(whole, group=group, group_src=0, async_op=True), whole)
            p.detach().copy_(values)
    buffers.broadcast()
