"""How gradients are sent between ranks: what may be chosen, and the collectives that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

import launcher.engine.limits as limits
from launcher.engine.async_work import Group
from launcher.engine.grads.collectives import AllReduceSum, Collective, ShardedSum
from launcher.engine.params.flat_params import POLICY_DTYPE_PARAMS, Layout

GRADIENT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class DDPOptions:
    """How gradients are sent between ranks.

    They are all-reduced in `gradient_dtype` (None: the policy's), in buckets of `bucket_bytes` (None: from
    the model's size), during the backward pass if `overlap`. With `shard_optimizer` masters and optimizer
    states are divided among the ranks (ZeRO-1): gradients are exchanged in `gradient_dtype` and summed in
    fp32 by the owner of each element. `gradient_predivide_factor` (not used if sharded) None: 1 up to 8
    ranks, else 2^ceil(log2(W) / 2), a power of two that keeps fp16 sums of many ranks in range.
    """

    gradient_dtype: Annotated[torch.dtype, limits.one_of(*GRADIENT_DTYPES)] | None = None
    bucket_bytes: Annotated[int, limits.at_least_one] | None = None
    overlap: bool = True
    gradient_predivide_factor: Annotated[int, limits.predivide] | None = None
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        limits.require_fields(self, "ddp")


def choose_collectives(ddp: DDPOptions, layout: Layout, group: Group) -> tuple[dict[str, Collective], int]:
    """The collective of each flat buffer, and the power of two by which the sum is divided.

    Vectors are fp32 and small: they are summed on all ranks in any case.
    """
    predivide_factor = 1
    if group is not None and not ddp.shard_optimizer:
        predivide_factor = ddp.gradient_predivide_factor or default_predivide_factor(layout.world_size)
    collectives: dict[str, Collective] = {
        flat_buffer.name: AllReduceSum(group, predivide_factor) for flat_buffer in layout.flat_buffers
    }
    if group is not None and ddp.shard_optimizer and POLICY_DTYPE_PARAMS in collectives:
        collectives[POLICY_DTYPE_PARAMS] = ShardedSum(group)
    return collectives, predivide_factor


def default_predivide_factor(world_size: int) -> int:
    """1 up to 8 ranks, else 2^ceil(log2(W) / 2)."""
    exponent = (world_size - 1).bit_length()  # ceil(log2(W))
    return 1 if world_size <= 8 else int(2 ** -(-exponent // 2))
