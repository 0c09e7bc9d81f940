"""Gradients from autograd onto the wire: buckets, accumulation, overlap with backward.

Owns the hooks on the parameters and every collective on gradients. Buckets are launched in one fixed order
on every rank, each as soon as all earlier ones are ready, whatever the order in which gradients arrive;
parameters without a gradient send zeros. Division by the number of ranks never happens here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.engine.layout import Layout, Segment, Slot
from launcher.engine.sums import SumOfSquares

FIRST_BUCKET_BYTES = 1 << 20
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 1 << 20, 25 << 20


@dataclass
class Bucket:
    """A contiguous range of one segment's gradients that travels as one all-reduce.

    `tail` elements behind the range belong to this bucket's message but to no parameter: the last bucket
    carries one slot per rank there, in which a rank says that its own gradient was not finite.
    """

    index: int  # position in the order of launching
    segment: Segment
    slots: list[Slot]
    message: Tensor
    tail: Tensor
    pending: int = 0
    work: dist.Work | None = None
    local_sums: Tensor | None = None


@dataclass
class Reduced:
    """What a step needs to know about the reduced gradient; all tensors on the device."""

    sums: Tensor  # [parameters] fp64 sums of squares, in the order of Slot.index
    culprits: Tensor  # [world_size] non-zero where a rank's own gradient was not finite
    bytes: int  # handed to collectives by this rank


@dataclass
class _Backward:
    """State of the micro-batch under way."""

    last: bool = False
    arrived: set[int] = field(default_factory=set)


class Reducer:
    """All-reduces the sum of the gradients of all ranks and micro-batches, in the dtype of the wire."""

    def __init__(
        self,
        layout: Layout,
        group: dist.ProcessGroup | None,
        micro_batches: int = 1,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        predivide: int = 1,
    ) -> None:
        self._layout = layout
        self._group = group
        self._world_size = dist.get_world_size(group) if group else 1
        self._rank = dist.get_rank(group) if group else 0
        self._overlap = overlap
        self._inverse = 1.0 / predivide
        self._sums = SumOfSquares(layout.device)
        self.buckets = _buckets(layout, self._world_size, bucket_bytes)
        self._home = {slot.index: bucket for bucket in self.buckets for slot in bucket.slots}
        self._accumulated = _accumulators(layout) if micro_batches > 1 else None
        self._summed: set[int] = set()  # slots whose accumulator holds a gradient of this step
        self._backward = _Backward()
        self._next = 0
        self._sent_bytes = 0
        self._hooks = [
            layout.parameters[slot.name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _hook(self, segment, slot)
            )
            for segment in layout.segments
            for slot in segment.slots
        ]

    def begin_backward(self, last: bool) -> None:
        """Say that a backward pass starts; `last` when it is the last of this step on this rank."""
        if not last and self._accumulated is None:
            raise RuntimeError("a reducer for one micro-batch per step was given more than one")
        self._backward = _Backward(last)
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots)

    def take(self, segment: Segment, slot: Slot, gradient: Tensor) -> None:
        """Receive a parameter's gradient from autograd."""
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {slot.name} is sparse; only dense ones can travel. Build the embedding "
                "with sparse=False."
            )
        again = slot.index in self._backward.arrived
        self._backward.arrived.add(slot.index)
        if again and self._home[slot.index].index < self._next:
            raise RuntimeError(
                f"parameter {slot.name} received a gradient twice in one backward pass, after its bucket "
                "was sent. Re-entrant activation checkpointing does that: use use_reentrant=False, or "
                "build the Stepper with overlap=False."
            )
        if self._accumulated is not None:
            self._accumulate(segment, slot, gradient)
        elif again:
            slot.view(segment.grad).add_(gradient * self._inverse)
        else:
            self._write(slot.view(segment.grad), gradient)
        if self._backward.last and self._overlap and not again:
            self._ready(slot)

    def flush(self) -> None:
        """Send all that is left: the buckets of parameters that received no gradient, with zeros.

        Every rank calls this once per step, so all ranks launch all buckets, in the same order.
        """
        arrived = self._backward.arrived if self._accumulated is None else set()
        for bucket in self.buckets[self._next :]:
            for slot in bucket.slots:
                if self._accumulated is not None:
                    self._write_accumulated(bucket.segment, slot)
                elif slot.index not in arrived:
                    slot.flat(bucket.segment.grad).zero_()
            self._launch(bucket)
        self._next = len(self.buckets)

    def finish(self) -> Reduced:
        """Wait for the buckets in order and look at each once while it is still in cache."""
        sums = []
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
                sums.append(self._sums(bucket.segment.grad, bucket.slots))
            else:
                assert bucket.local_sums is not None
                sums.append(bucket.local_sums)
        reduced = Reduced(torch.cat(sums), self.buckets[-1].tail, self._sent_bytes)
        self._backward, self._summed = _Backward(), set()
        self._next, self._sent_bytes = 0, 0
        return reduced

    def tensors(self) -> list[Tensor]:
        """What is held here beside the wire gradients themselves: accumulators and the tail."""
        return [self.buckets[-1].tail, *(self._accumulated or {}).values()]

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _write(self, wire: Tensor, gradient: Tensor) -> None:
        """Into the wire buffer, computed in fp32 and rounded once; the pre-divisor costs no pass."""
        if self._inverse == 1.0:
            wire.copy_(gradient)
        else:
            torch.mul(gradient, self._inverse, out=wire)

    def _accumulate(self, segment: Segment, slot: Slot, gradient: Tensor) -> None:
        assert self._accumulated is not None
        total = slot.view(self._accumulated[segment.name])
        if slot.index in self._summed:
            total.add_(gradient)
        else:
            total.copy_(gradient)
            self._summed.add(slot.index)

    def _write_accumulated(self, segment: Segment, slot: Slot) -> None:
        assert self._accumulated is not None
        if slot.index in self._summed:
            self._write(slot.flat(segment.grad), slot.flat(self._accumulated[segment.name]))
        else:
            slot.flat(segment.grad).zero_()

    def _ready(self, slot: Slot) -> None:
        self._home[slot.index].pending -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            bucket = self.buckets[self._next]
            if self._accumulated is not None:
                for member in bucket.slots:
                    self._write_accumulated(bucket.segment, member)
            self._launch(bucket)
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        """Look at this rank's own gradient, then send it. The look of earlier buckets rides in the tail."""
        bucket.local_sums = self._sums(bucket.segment.grad, bucket.slots)
        if bucket.tail.numel():
            own = torch.cat([b.local_sums for b in self.buckets if b.local_sums is not None])
            bucket.tail.zero_()
            bucket.tail[self._rank] = ~own.sum().isfinite()
        if self._group is not None:
            bucket.work = dist.all_reduce(bucket.message, group=self._group, async_op=True)
            self._sent_bytes += bucket.message.numel() * bucket.message.element_size()


def _hook(reducer: Reducer, segment: Segment, slot: Slot) -> Callable[[nn.Parameter], None]:
    """The hook for one parameter. It holds the reducer weakly: the model does not keep it alive."""
    held = weakref.ref(reducer)

    def receive(parameter: nn.Parameter) -> None:
        reducer = held()
        if reducer is not None and parameter.grad is not None:
            reducer.take(segment, slot, parameter.grad)
            parameter.grad = None

    return receive


def _accumulators(layout: Layout) -> dict[str, Tensor]:
    """fp32 buffers in which micro-batches are summed, 4 bytes per parameter."""
    return {
        segment.name: torch.zeros(segment.numel, dtype=torch.float32, device=layout.device)
        for segment in layout.segments
    }


def _buckets(layout: Layout, world_size: int, bucket_bytes: int | None) -> list[Bucket]:
    """Cut the segments into messages: a small one first, so that the wire starts early.

    The gradient buffer of the last segment is re-made with `world_size` elements behind its end.
    """
    last = layout.segments[-1]
    whole = torch.zeros(last.numel + world_size, dtype=last.grad.dtype, device=layout.device)
    last.grad = whole[: last.numel]
    total = sum(segment.numel * segment.grad.element_size() for segment in layout.segments)
    wish = bucket_bytes or min(max(total // 8, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)
    buckets: list[Bucket] = []
    for segment in layout.segments:
        groups: list[list[Slot]] = [[]]
        for slot in segment.slots:
            limit = wish if buckets or len(groups) > 1 else min(wish, FIRST_BUCKET_BYTES)
            held = sum(s.numel for s in groups[-1]) * segment.grad.element_size()
            if groups[-1] and held + slot.numel * segment.grad.element_size() > limit:
                groups.append([])
            groups[-1].append(slot)
        ends = [group[0].offset for group in groups[1:]] + [segment.numel]
        for group, end in zip(groups, ends, strict=True):
            message = segment.grad[group[0].offset : end]
            buckets.append(Bucket(len(buckets), segment, group, message, message[:0]))
    buckets[-1].message = whole[buckets[-1].slots[0].offset :]
    buckets[-1].tail = whole[last.numel :]
    return buckets
