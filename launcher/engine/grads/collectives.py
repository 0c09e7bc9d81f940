"""How one bucket of gradients is reduced over the ranks.

Owns the collectives on gradients and, where the optimizer is sharded, on weights. Each collective sums over
the ranks; none divides in half precision. They differ in where the sum is rounded:

native   all-reduce in `gradient_dtype`; the library rounds at each hop
sharded  all-to-all, the fp32 sum stays with its owner, who updates and gathers the new weights
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.async_work as async_work
from launcher.engine.grads.bucket import Bucket, Collective
from launcher.engine.params.flat_buffers import BucketRange, FlatBuffer


class AllReduceSum(Collective):
    """All-reduce SUM in `gradient_dtype`."""

    def __init__(self, group: async_work.Group, predivide_factor: int = 1) -> None:
        self._group = group
        self.send_multiplier = 1.0 / predivide_factor

    def start(self, bucket: Bucket) -> int:
        if self._group is None:
            return 0
        bucket.work = async_work.started(dist.all_reduce(bucket.message, group=self._group, async_op=True))
        return bucket.size_bytes

    def wait(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            async_work.wait_for(bucket.work, bucket.message)
            bucket.work = None


class ShardedSum(Collective):
    """All-to-all in half; each rank keeps the fp32 sum of the elements that it owns, and updates those.

    The sum is stored in the memory of the gradients that were sent: twice their size, W times fewer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)

    def clear_padding(self, bucket: Bucket) -> None:
        for gap in bucket.bucket_range.gaps():
            bucket.flat_buffer.grad[gap].zero_()  # may hold the previous step's sum

    def start(self, bucket: Bucket) -> int:
        # Each rank receives all ranks' values of the elements that it owns.
        bucket.received = torch.empty_like(bucket.message)
        exchange = dist.all_to_all_single(bucket.received, bucket.message, group=self._group, async_op=True)
        bucket.work = async_work.started(exchange)
        # An all-reduce moves its bytes twice; here the gather of the weights is the second time.
        weight_bytes = bucket.message.numel() * bucket.flat_buffer.weight.element_size()
        return (bucket.size_bytes + weight_bytes) // 2

    def wait(self, bucket: Bucket) -> None:
        if bucket.received is not None:  # else it has been waited for, before memory ran out elsewhere
            async_work.wait_for(bucket.work, bucket.message)
            rows = bucket.received.view(self._world_size, -1)  # [rank, element]
            total = rows.sum(dim=0, dtype=torch.float32) if rows.is_cuda else sum_of_rows(rows)
            self.owned(bucket.flat_buffer, bucket.bucket_range).copy_(total)
            bucket.work = bucket.received = None

    def owned(self, flat_buffer: FlatBuffer, bucket_range: BucketRange) -> Tensor:
        """This rank's shard of the reduced gradient of a bucket, fp32, flat."""
        length = (bucket_range.end - bucket_range.start) // self._world_size
        return flat_buffer.grad[bucket_range.start : bucket_range.end].view(torch.float32)[:length]

    def parts(self, bucket: Bucket) -> list[Tensor]:
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


def is_sharded(collectives: Mapping[str, Collective]) -> bool:
    """Whether masters and states of some parameters have one owner each among the ranks."""
    return any(isinstance(collective, ShardedSum) for collective in collectives.values())


def sum_of_rows(rows: Tensor) -> Tensor:
    """fp32 [columns]: the sum of `rows` [rows, columns], which may be overwritten. For a CPU.

    Pairwise, all pairs of rows in one call: the calls grow with the logarithm of the number of rows. An
    element's bits do not depend on the elements beside it, as they do in torch's sum over a dimension.
    """
    number = rows.shape[0]
    while number > 1:
        half, odd = divmod(number, 2)
        total = rows[:half].float().add_(rows[half : 2 * half])
        if odd:
            total[0].add_(rows[-1])
        rows, number = total, half
    return rows[0].float()


def start_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start `whole` [W * n] from each rank's `own` [n]. Keep both until the work has been waited for."""
    # torch 2.13 renamed it and warns about the old name; 2.11 has only the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return async_work.started(gather(whole, own, group=group, async_op=True))
