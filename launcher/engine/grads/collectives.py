"""How gradients are sent between ranks: the options, and how one bucket is reduced.

Owns the collectives on gradients and, where the optimizer is sharded, on weights. Each collective sums over
the ranks; none divides in half precision. They differ in where the sum is rounded:

AllReduceSum   all-reduce in `gradient_dtype`; the library rounds at each hop
ShardedSum     all-to-all, the fp32 sum stays with its owner, who updates and gathers the new weights

The reducer has the order in which buckets are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.async_work as async_work
import launcher.engine.limits as limits
from launcher.engine.grads.copy_in import CopyIn
from launcher.engine.params.flat_buffers import BucketRange, FlatBuffer, ParamRange
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


@dataclass
class Bucket:
    """Adjacent parameters of a flat buffer, whose gradients are sent between ranks in one message.

    `copy_in` fills the message; `work` and `received` are those of its collective while that is under way.
    `extremes` are the least and the greatest element of this rank's gradient.
    """

    index: int  # position in the order of sending
    flat_buffer: FlatBuffer
    bucket_range: BucketRange
    collective: Collective
    message: Tensor
    copy_in: CopyIn
    work: dist.Work | None = None
    received: Tensor | None = None
    extremes: Sequence[Tensor] = ()

    @property
    def params(self) -> Sequence[ParamRange]:
        return self.bucket_range.params

    @property
    def size_bytes(self) -> int:
        return self.message.numel() * self.message.element_size()

    def clear_padding(self) -> None:
        for gap in self.bucket_range.gaps():
            self.flat_buffer.grad[gap].zero_()


class AllReduceSum:
    """All-reduce SUM in `gradient_dtype` of what is divided by `predivide_factor`, a power of two, before."""

    def __init__(self, group: async_work.Group, predivide_factor: int = 1) -> None:
        self._group = group
        self.send_multiplier = 1.0 / predivide_factor

    def start(self, bucket: Bucket) -> int:
        """Start sending; returns the bytes that this rank sends, in one direction of the all-reduce."""
        if self._group is None:
            return 0
        bucket.work = async_work.started(dist.all_reduce(bucket.message, group=self._group, async_op=True))
        return bucket.size_bytes

    def wait(self, bucket: Bucket) -> None:
        """Wait for the sum over the ranks (on CUDA: make the current stream wait)."""
        if bucket.work is not None:
            async_work.wait_for(bucket.work, bucket.message)
            bucket.work = None

    def reduced_by_param(self, bucket: Bucket) -> list[Tensor]:
        """The reduced gradient as this rank holds it, flat, by parameter of the bucket."""
        return [param.flat(bucket.flat_buffer.grad) for param in bucket.params]


class ShardedSum:
    """All-to-all in half; each rank keeps the fp32 sum of the elements that it owns, and updates those.

    The sum is stored in the memory of the gradients that were sent: twice their size, W times fewer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self.send_multiplier = 1.0  # sums are fp32

    def start(self, bucket: Bucket) -> int:
        """Start sending; returns the bytes, counted as those of an all-reduce of the same traffic."""
        # Each rank receives all ranks' values of the elements that it owns.
        bucket.received = torch.empty_like(bucket.message)
        exchange = dist.all_to_all_single(bucket.received, bucket.message, group=self._group, async_op=True)
        bucket.work = async_work.started(exchange)
        # An all-reduce moves its bytes twice; here the gather of the weights is the second time.
        weight_bytes = bucket.message.numel() * bucket.flat_buffer.weight.element_size()
        return (bucket.size_bytes + weight_bytes) // 2

    def wait(self, bucket: Bucket) -> None:
        """Wait for the values of all ranks, and add them up."""
        if bucket.received is not None:  # else it has been waited for, before memory ran out elsewhere
            async_work.wait_for(bucket.work, bucket.message)
            rows = bucket.received.view(self._world_size, -1)  # [rank, element]
            total = rows.sum(dim=0, dtype=torch.float32)
            self.owned(bucket.flat_buffer, bucket.bucket_range).copy_(total)
            bucket.work = bucket.received = None

    def owned(self, flat_buffer: FlatBuffer, bucket_range: BucketRange) -> Tensor:
        """This rank's shard of the reduced gradient of a bucket, fp32, flat."""
        length = (bucket_range.end - bucket_range.start) // self._world_size
        return flat_buffer.grad[bucket_range.start : bucket_range.end].view(torch.float32)[:length]

    def reduced_by_param(self, bucket: Bucket) -> list[Tensor]:
        """The elements of the reduced gradient that this rank owns, fp32, flat, by parameter."""
        owned = self.owned(bucket.flat_buffer, bucket.bucket_range)
        shard = bucket.bucket_range.shard(self._rank, self._world_size)
        return [owned[param.within(shard)] for param in bucket.params]

    def gather_weights(self, flat_buffer: FlatBuffer) -> None:
        """Give all ranks the weights that each has updated. A collective: all ranks call it."""
        gathers = []
        for bucket_range in flat_buffer.bucket_ranges:
            whole = flat_buffer.weight[bucket_range.start : bucket_range.end]
            # A copy, because the shard lies within `whole`, which the gather writes.
            own = flat_buffer.weight[bucket_range.shard(self._rank, self._world_size)].clone()
            gathers.append((start_gather(whole, own, self._group), whole, own))
        for work, whole, _ in gathers:
            async_work.wait_for(work, whole)


Collective = AllReduceSum | ShardedSum


def choose_collectives(
    ddp: DDPOptions, layout: Layout, group: async_work.Group
) -> tuple[dict[str, Collective], int]:
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


def start_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start `whole` [W * n] from each rank's `own` [n]. Keep both until the work has been waited for."""
    # torch 2.13 renamed it and warns about the old name; 2.11 has only the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return async_work.started(gather(whole, own, group=group, async_op=True))
