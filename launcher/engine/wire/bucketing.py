"""The division of a step's gradients into buckets, built once before the first step.

Owns the buckets in launch order, their memory, and the functions that sum their squares. The Reducer fills
and sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from launcher.engine.flat.layout import Layout, Segment, SlotRun
from launcher.engine.wire.grad_norm import SumOfSquares
from launcher.engine.wire.inbox import Inbox
from launcher.engine.wire.transports import Bucket, ShardedSum, Transport


class Bucketing:
    """The buckets, with what receives their gradients and what sums their squares.

    `travels`: whether there is a group. Building it moves the last segment's gradients to new memory.
    """

    def __init__(
        self,
        layout: Layout,
        transports: Mapping[str, Transport],
        sums: SumOfSquares,
        travels: bool,
        accumulates: bool,
    ) -> None:
        self._layout, self._transports, self._sums, self._travels = layout, transports, sums, travels
        last = layout.segments[-1]
        # The last segment's gradients and one more element per rank.
        self._whole = torch.zeros(last.numel + layout.world_size, dtype=last.grad.dtype, device=layout.device)
        last.grad = self._whole[: last.numel]
        self.accumulated = self._accumulators(accumulates)  # by segment; none for one micro-batch per step
        self.regroup(layout.message_bytes)

    def regroup(self, message_bytes: int) -> None:
        """Divide the same memory into messages of about so many bytes. Between steps only."""
        buckets = self._buckets(message_bytes)
        for group in self._read_together(buckets):
            group[-1].reads_reduced = self._sums.over(_parts(group))
        whole = [not isinstance(bucket.transport, ShardedSum) for bucket in buckets for _ in bucket.slots]
        replicated = torch.tensor(whole, device=self._layout.device)
        # Both at once, after everything that may run out of memory.
        self.buckets = buckets  # in launch order, the same on all ranks
        self.replicated = replicated  # [parameters] bool: those whose reduced gradient is not sharded

    def accumulate(self, accumulates: bool) -> None:
        """Make room for several micro-batches per step, or free it. Between steps only."""
        if accumulates != bool(self.accumulated):
            self.accumulated = self._accumulators(accumulates)  # may run out of memory
            for bucket in self.buckets:
                bucket.inbox = self._inbox(bucket.segment, bucket.run)

    def _accumulators(self, accumulates: bool) -> dict[str, Tensor]:
        """fp32 buffers in which micro-batches are summed, 4 bytes per parameter, by segment, if wanted."""
        return {
            segment.name: torch.zeros(segment.numel, dtype=torch.float32, device=self._layout.device)
            for segment in self._layout.segments
            if accumulates
        }

    def _inbox(self, segment: Segment, run: SlotRun) -> Inbox:
        factor, totals = self._transports[segment.name].before, self.accumulated.get(segment.name)
        return Inbox(segment, run, self._layout.parameters, factor, totals)

    def _buckets(self, message_bytes: int) -> list[Bucket]:
        """One bucket per message.

        The elements beside the last segment's gradients are sent with the last bucket, unless it is sharded:
        no rank would receive them all.
        """
        buckets: list[Bucket] = []
        for segment in self._layout.segments:
            for run in self._layout.messages(segment, message_bytes):
                message, transport = segment.grad[run.start : run.end], self._transports[segment.name]
                own = [slot.flat(segment.grad) for slot in run.slots]
                reads_own = self._sums.finite_over(own) if self._travels else None
                inbox = self._inbox(segment, run)
                buckets.append(
                    Bucket(len(buckets), segment, run, transport, message, message[:0], inbox, reads_own)
                )
        last = buckets[-1]
        if not isinstance(last.transport, ShardedSum):
            last.message = self._whole[last.run.start :]
        last.tail = self._whole[last.segment.numel :]
        return buckets

    def _read_together(self, buckets: Sequence[Bucket]) -> Iterator[Sequence[Bucket]]:
        """The buckets by the reads of their reduced gradients.

        One read of a segment costs least, and one of a whole small model. A CPU that waits for the last
        bucket has time to read the others: the last one alone is what a step on a slow link still has to read
        at its end.
        """
        if not self._travels and self._sums.are_few(_parts(buckets)):
            yield buckets
            return
        for segment in self._layout.segments:
            own = [bucket for bucket in buckets if bucket.segment is segment]
            waits = self._travels and self._layout.device.type == "cpu" and len(own) > 1
            yield from [own[:-1], own[-1:]] if waits else [own]


def _parts(buckets: Sequence[Bucket]) -> list[Tensor]:
    """The reduced gradient of these buckets as this rank holds it, flat, by parameter."""
    return [part for bucket in buckets for part in bucket.transport.parts(bucket)]
