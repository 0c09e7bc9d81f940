"""How one bucket of gradients is reduced over the ranks: transports that send the same bytes.

Owns the collectives on gradients and, where the optimizer is sharded, on weights. Each transport sums over
the ranks; none divides in half precision. They differ in where the sum is rounded:

native   all-reduce in the dtype of the wire; the library rounds at each hop
fp32     all-to-all, sum in fp32, one rounding, all-gather; of two ranks on CPUs in one exchange
sharded  all-to-all, the fp32 sum stays with its owner, who updates and gathers the new weights
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.works as works
from launcher.engine.flat.layout import Segment, Slot, SlotRun
from launcher.engine.wire.grad_norm import ReadSums
from launcher.engine.wire.inbox import Inbox

CHUNK = 1 << 17  # elements that are summed at once
PAIR_TAG = 1 << 20  # of the first bucket's messages between two ranks; a user's own tags are small


@dataclass
class Bucket:
    """One run of a segment's gradients and its message on the wire.

    `inbox` fills the message. What `reads_own` gives is finite if this rank's gradient is; None without a
    group. `reads_reduced` sums the squares of the reduced gradient as this rank holds it, of this bucket and
    of those before it from the last that has such a function.

    `tail` follows the run's elements and belongs to no parameter. In the last bucket it has one slot per
    rank, in which a rank marks that its own gradient was not finite, or that it abandons the step.
    """

    index: int  # position in the order of launching
    segment: Segment
    run: SlotRun
    transport: Transport
    message: Tensor
    tail: Tensor
    inbox: Inbox
    reads_own: ReadSums | None
    reads_reduced: ReadSums | None = None
    work: dist.Work | None = None
    sent: dist.Work | None = None  # to the other rank of two
    received: Tensor | None = None
    own_look: Tensor | None = None  # not finite if this rank's gradient is not

    @property
    def slots(self) -> Sequence[Slot]:
        return self.run.slots

    @property
    def size_bytes(self) -> int:
        return self.message.numel() * self.message.element_size()


class SideStream:
    """A second CUDA stream, for the work after a collective, concurrent with the backward pass.

    `after_current`, then any number of `alone`, then `join`; the same in a CUDA graph. Events order it with
    the stream of the training step; the host never waits. Memory allocated within its contexts belongs to it
    and is used only there, so it can be reused as soon as it is freed. On other devices all calls run inline.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority: its work is short, and the next collective waits for it.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def is_concurrent(self) -> bool:
        """Whether there is a second stream: on CUDA."""
        return self._stream is not None

    def after_current(self) -> AbstractContextManager[object]:
        """Run on the side stream, after all work queued on the current stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self.alone()

    def alone(self) -> AbstractContextManager[object]:
        """Run on the side stream, after the work queued there before."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make the current stream wait for all work queued on the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Transport:
    """Sends buckets of one segment. By itself it says what holds for a single exchange: nothing follows it.

    `before` multiplies what is written into a message, `after` the sum over the ranks: powers of two.
    """

    before = after = 1.0

    def launch(self, bucket: Bucket) -> int:
        """Start sending; returns the bytes, counted as those of an all-reduce of the same traffic."""
        raise NotImplementedError

    def can_follow(self, bucket: Bucket) -> bool:
        """Whether `follow` may be called within backward: on CUDA always, else if it would not block."""
        return True

    def follow(self, bucket: Bucket) -> None:
        """Start the stage after the first exchange: on CUDA on the side stream, else blocking."""

    def wait(self, bucket: Bucket) -> None:
        """Wait for what `follow` has started. On CUDA `join` must follow."""
        raise NotImplementedError

    def join(self) -> None:
        """Make the current stream wait for the results of the buckets waited for; only on CUDA."""

    def parts(self, bucket: Bucket) -> list[Tensor]:
        """The reduced gradient as this rank holds it, flat, by slot of the bucket."""
        return [slot.flat(bucket.segment.grad) for slot in bucket.slots]


class NativeSum(Transport):
    """All-reduce SUM in the dtype of the wire."""

    def __init__(self, group: works.Group, divisor: int = 1) -> None:
        self._group = group
        self.before = 1.0 / divisor

    def launch(self, bucket: Bucket) -> int:
        if self._group is None:
            return 0
        bucket.work = works.started(dist.all_reduce(bucket.message, group=self._group, async_op=True))
        return bucket.size_bytes

    def wait(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            works.wait_for(bucket.work, bucket.message)
            bucket.work = None


class WideSum(Transport):
    """All-to-all in half, sum in fp32, divided by a power of two and rounded once, all-gather in half.

    With `divisor` >= the number of ranks the result is at most the mean, so it cannot overflow where the
    parts did not. If exchanges overlap with the backward pass, gathers over Gloo have a group of their own.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, divisor: int, overlaps: bool) -> None:
        self._group, self._side = group, SideStream(device)
        self._second = second_group(group) if overlaps and is_gloo(group) else None
        self.after = 1.0 / divisor

    def launch(self, bucket: Bucket) -> int:
        with self._side.after_current():
            exchange(bucket, self._group)
        return bucket.size_bytes

    def can_follow(self, bucket: Bucket) -> bool:
        if bucket.message.device.type != "cpu":
            return True
        # When an exchange completes differs between ranks, and so does the place of its gather among the
        # collectives of a group. In a group of their own the gathers are in the order of the buckets.
        return self._second is not None and bucket.work is not None and bucket.work.is_completed()

    def follow(self, bucket: Bucket) -> None:
        with self._side.alone():
            mean = sum_of_received(bucket, self._group).mul_(self.after).to(bucket.message.dtype)
            bucket.work = start_gather(bucket.message, mean, self._second or self._group)
            bucket.received = mean  # keep it alive until it is gathered

    def wait(self, bucket: Bucket) -> None:
        with self._side.alone():
            works.wait_for(bucket.work, bucket.message)
            bucket.work = bucket.received = None

    def join(self) -> None:
        self._side.join()


class WidePair(Transport):
    """The sum of WideSum for two ranks over Gloo: each sends the other its whole message.

    As many bytes and the same bits, in one exchange instead of two: the last of the gathers would start only
    when the last sum is there.
    """

    after = 0.5

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank(group)

    def launch(self, bucket: Bucket) -> int:
        received, tag, other = torch.empty_like(bucket.message), PAIR_TAG + bucket.index, 1 - self._rank
        receiving = dist.irecv(received, group=self._group, group_src=other, tag=tag)
        sending = dist.isend(bucket.message, group=self._group, group_dst=other, tag=tag)
        bucket.work, bucket.sent = works.started(receiving), works.started(sending)
        bucket.received = received
        return bucket.size_bytes

    def wait(self, bucket: Bucket) -> None:
        assert bucket.received is not None
        limit = timeout_of(self._group)
        works.wait_for_message(bucket.work, limit)
        works.wait_for_message(bucket.sent, limit)
        pairs = zip(*(torch.split(each, CHUNK) for each in (bucket.message, bucket.received)), strict=True)
        for own, other in pairs:  # in caches; in the order of the ranks, of which a nan has the bits
            first, second = (other, own) if self._rank else (own, other)
            own.copy_(first.float().add_(second).mul_(self.after))
        bucket.work = bucket.sent = bucket.received = None


class ShardedSum(Transport):
    """All-to-all in half; each rank keeps the fp32 sum of the elements that it owns, and updates those.

    The sum is stored in the memory of the gradients that were sent: twice their size, W times fewer.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._side = group, SideStream(device)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)

    def launch(self, bucket: Bucket) -> int:
        for gap in bucket.run.gaps():
            bucket.segment.grad[gap].zero_()  # may hold the previous step's sum
        with self._side.after_current():
            exchange(bucket, self._group)
        return bucket.size_bytes  # the gather of the weights is the other half

    def can_follow(self, bucket: Bucket) -> bool:
        return self._side.is_concurrent

    def follow(self, bucket: Bucket) -> None:
        if self._side.is_concurrent:
            self._sum(bucket)

    def wait(self, bucket: Bucket) -> None:
        if not self._side.is_concurrent:
            self._sum(bucket)

    def _sum(self, bucket: Bucket) -> None:
        with self._side.alone():
            self.owned(bucket.segment, bucket.run).copy_(sum_of_received(bucket, self._group))
            bucket.work = bucket.received = None

    def join(self) -> None:
        self._side.join()

    def owned(self, segment: Segment, run: SlotRun) -> Tensor:
        """This rank's piece of the reduced gradient of a run, fp32, flat."""
        length = (run.end - run.start) // self._world_size
        return segment.grad[run.start : run.end].view(torch.float32)[:length]

    def parts(self, bucket: Bucket) -> list[Tensor]:
        owned, piece = self.owned(bucket.segment, bucket.run), bucket.run.piece(self._rank, self._world_size)
        return [owned[slot.within(piece)] for slot in bucket.slots]

    def gather_weights(self, segment: Segment) -> None:
        """Give all ranks the weights that each has updated. A collective: all ranks call it."""
        gathers = []
        for run in segment.runs:
            whole = segment.weight[run.start : run.end]
            # A copy, because the piece lies within `whole`, which the gather writes.
            own = segment.weight[run.piece(self._rank, self._world_size)].clone()
            gathers.append((start_gather(whole, own, self._group), whole, own))
        for work, whole, _ in gathers:
            works.wait_for(work, whole)


def is_gloo(group: dist.ProcessGroup) -> bool:
    return str(dist.get_backend(group)) == "gloo"


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks over Gloo, whose collectives are ordered among themselves only. A collective.

    There the host waits: on CUDA streams order the stages.
    """
    timeout, ranks = timeout_of(group), dist.get_process_group_ranks(group)
    # Only the members call this: otherwise torch would wait for all ranks of the job.
    made = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group over Gloo may take, which can change after its first ones."""
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    assert isinstance(timeout, timedelta)
    return timeout


def is_sharded(transports: Mapping[str, Transport]) -> bool:
    """Whether masters and states of some parameters have one owner each among the ranks."""
    return any(isinstance(transport, ShardedSum) for transport in transports.values())


def exchange(bucket: Bucket, group: dist.ProcessGroup) -> None:
    """Start the all-to-all in which each rank receives all ranks' values of the elements that it owns."""
    bucket.received = torch.empty_like(bucket.message)
    bucket.work = works.started(
        dist.all_to_all_single(bucket.received, bucket.message, group=group, async_op=True)
    )


def sum_of_received(bucket: Bucket, group: dist.ProcessGroup) -> Tensor:
    """fp32 [message / W]: the sum over the ranks of what `exchange` received.

    The bucket keeps that, so that this can be repeated where there was no memory for the sum.
    """
    assert bucket.received is not None
    works.wait_for(bucket.work, bucket.message)
    rows = bucket.received.view(dist.get_world_size(group), -1)  # [rank, element]
    return rows.sum(dim=0, dtype=torch.float32) if rows.is_cuda else sum_of_rows(rows)


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
    return works.started(gather(whole, own, group=group, async_op=True))
