"""What may be chosen of the wire, and the transport of each segment that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.distributed as dist

import launcher.engine.limits as limits
from launcher.engine.flat.layout import VECTORS, Layout
from launcher.engine.wire.transports import NativeSum, ShardedSum, Transport, WidePair, WideSum, is_gloo
from launcher.engine.works import Group

WIRE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Wire:
    """How gradients are sent. `dtype` None: the policy's; `bucket_bytes` None: from the model's size.

    `sum`: `native`, all-reduced in the dtype of the wire, or `fp32`, exchanged in half and summed in fp32.
    `shard`: masters and optimizer states are divided among the ranks; sums are then fp32 in any case.
    `predivide` (native sums) None: 1 up to 8 ranks, else 2^ceil(log2(W) / 2), a power of two that keeps
    fp16 sums of many ranks in range.
    """

    dtype: Annotated[torch.dtype | None, limits.none_or_one_of(*WIRE_DTYPES)] = None
    bucket_bytes: Annotated[int, limits.at_least_one] | None = None
    overlap: bool = True
    predivide: Annotated[int, limits.predivide] | None = None
    sum: Literal["native", "fp32"] = "native"
    shard: bool = False

    def __post_init__(self) -> None:
        limits.require_fields(self, "wire")


def choose_transports(wire: Wire, layout: Layout, group: Group) -> tuple[dict[str, Transport], int]:
    """The transport of each segment, and the power of two by which the sum is divided.

    Vectors are fp32 and small: they are summed on all ranks whatever the wire.
    """
    if group is None:
        return {segment.name: NativeSum(None) for segment in layout.segments}, 1
    divisor = 1
    own: Transport | None = None  # of segments that are not summed in their dtype
    shard = wire.shard and layout.world_size > 1  # its sum has twice the bytes of a message
    if shard:
        own = ShardedSum(group, layout.device)
    elif wire.sum == "native":
        divisor = wire.predivide or default_predivide(layout.world_size)
    else:
        divisor = 1 << (layout.world_size - 1).bit_length()  # the smallest power of two >= W
        pair = is_pair(layout, group)
        own = WidePair(group) if pair else WideSum(group, layout.device, divisor, wire.overlap)
    found: dict[str, Transport] = {}
    for segment in layout.segments:
        native = segment.name == VECTORS if shard else segment.grad.dtype == torch.float32
        found[segment.name] = NativeSum(group, divisor) if native or own is None else own
    return found, divisor


def may_regroup(wire: Wire, wire_dtype: torch.dtype, world_size: int) -> bool:
    """Whether buckets may change size during training: then neither bits nor owners may depend on them.

    A ring sums the pieces of a message in different orders of the ranks, which matters from 3 ranks on.
    Sums in fp32 have one order, unless the wire is fp32 itself.
    """
    if wire.bucket_bytes is not None or wire.shard or world_size == 1:
        return False
    return world_size == 2 or (wire.sum == "fp32" and wire_dtype != torch.float32)


def is_pair(layout: Layout, group: dist.ProcessGroup) -> bool:
    """Whether WidePair can be used."""
    return layout.world_size == 2 and layout.device.type == "cpu" and is_gloo(group)


def default_predivide(world_size: int) -> int:
    """1 up to 8 ranks, else 2^ceil(log2(W) / 2)."""
    exponent = (world_size - 1).bit_length()  # ceil(log2(W))
    return 1 if world_size <= 8 else int(2 ** -(-exponent // 2))
