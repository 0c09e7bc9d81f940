"""The division of a step's gradients into buckets, built once before the first step.

Owns the buckets in launch order, their memory, and the functions that sum their squares. The Reducer fills
and sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from launcher.engine.flat.layout import Layout
from launcher.engine.wire.grad_norm import ReadSums, SumOfSquares
from launcher.engine.wire.inbox import Inbox
from launcher.engine.wire.transports import Bucket, ShardedSum, Transport


@dataclass(frozen=True)
class Look:
    """One read of the reduced gradients of adjacent buckets, possible once bucket `last` has arrived."""

    last: int
    sums: ReadSums


@dataclass(frozen=True)
class Bucketing:
    """The buckets, and by bucket what receives gradients and what sums their squares."""

    buckets: list[Bucket]  # in launch order, the same on all ranks
    whole: Tensor  # the last segment's gradients and one more element per rank
    inboxes: list[Inbox]  # by bucket
    accumulated: list[Tensor]  # fp32, flat, by segment; empty for one micro-batch per step
    own_looks: list[ReadSums]  # by bucket, whether this rank's gradient is finite; none without a group
    looks: list[Look]  # at the reduced gradient as this rank holds it, in the order of the parameters
    replicated: Tensor  # [parameters] bool: those whose reduced gradient is not sharded

    @classmethod
    def of(
        cls,
        layout: Layout,
        transports: Mapping[str, Transport],
        sums: SumOfSquares,
        totals: Mapping[str, Tensor],
        travels: bool,
        message_bytes: int | None = None,
        whole: Tensor | None = None,
    ) -> Bucketing:
        """Messages of about `message_bytes`, None: of the layout's; in the memory `whole`, None: new.

        `totals` are the accumulators by segment, none for one micro-batch per step. `travels`: whether there
        is a group. Moves the last segment's gradients to new memory.
        """
        whole = _with_tail(layout) if whole is None else whole
        message_bytes = message_bytes or layout.message_bytes
        buckets = _buckets(layout, transports, message_bytes, whole)
        return cls(
            buckets,
            whole,
            _inboxes(layout, buckets, transports, totals),
            list(totals.values()),
            [sums.finite_over([slot.flat(b.segment.grad) for slot in b.slots]) for b in buckets if travels],
            [
                Look(group[-1].index, sums.over(_parts(group, transports)))
                for group in _read_together(buckets, transports, sums, layout, travels)
            ],
            _replicated(layout, buckets, transports),
        )

    def accumulating(
        self, layout: Layout, transports: Mapping[str, Transport], accumulates: bool
    ) -> Bucketing:
        """The same buckets, for a step of several micro-batches or of one. Between steps only."""
        if accumulates == bool(self.accumulated):
            return self
        totals = accumulators(layout, accumulates)
        inboxes = _inboxes(layout, self.buckets, transports, totals)
        return replace(self, inboxes=inboxes, accumulated=list(totals.values()))

    def regrouped(
        self, layout: Layout, transports: Mapping[str, Transport], sums: SumOfSquares, message_bytes: int
    ) -> Bucketing:
        """The same memory in messages of about so many bytes, where there is a group. Between steps only."""
        totals = {
            # Not strict: there are no accumulators for one micro-batch per step.
            segment.name: total
            for segment, total in zip(layout.segments, self.accumulated, strict=False)
        }
        return Bucketing.of(layout, transports, sums, totals, True, message_bytes, self.whole)


def _inboxes(
    layout: Layout,
    buckets: Sequence[Bucket],
    transports: Mapping[str, Transport],
    totals: Mapping[str, Tensor],
) -> list[Inbox]:
    """One per bucket; `totals` are the accumulators by segment, none for one micro-batch per step."""
    return [
        Inbox(
            b.segment, b.run, layout.parameters, transports[b.segment.name].before, totals.get(b.segment.name)
        )
        for b in buckets
    ]


def _with_tail(layout: Layout) -> Tensor:
    """Reallocate the last segment's gradients with one more element per rank; returns all of it."""
    last = layout.segments[-1]
    whole = torch.zeros(last.numel + layout.world_size, dtype=last.grad.dtype, device=layout.device)
    last.grad = whole[: last.numel]
    return whole


def _buckets(
    layout: Layout, transports: Mapping[str, Transport], message_bytes: int, whole: Tensor
) -> list[Bucket]:
    """One bucket per message. `whole` is the last segment's gradients with one more element per rank.

    Those elements are sent with the last bucket, unless it is sharded: no rank would receive them all.
    """
    last = layout.segments[-1]
    pairs = [(segment, run) for segment in layout.segments for run in layout.messages(segment, message_bytes)]
    buckets = []
    for index, (segment, run) in enumerate(pairs):
        message = segment.grad[run.start : run.end]
        buckets.append(Bucket(index, segment, run, message, message[:0]))
    if not isinstance(transports[last.name], ShardedSum):
        buckets[-1].message = whole[pairs[-1][1].start :]
    buckets[-1].tail = whole[last.numel :]
    return buckets


def accumulators(layout: Layout, accumulates: bool) -> dict[str, Tensor]:
    """fp32 buffers in which micro-batches are summed, 4 bytes per parameter, by segment, if wanted."""
    if not accumulates:
        return {}
    return {
        segment.name: torch.zeros(segment.numel, dtype=torch.float32, device=layout.device)
        for segment in layout.segments
    }


def _read_together(
    buckets: list[Bucket],
    transports: Mapping[str, Transport],
    sums: SumOfSquares,
    layout: Layout,
    travels: bool,
) -> Iterator[list[Bucket]]:
    """The buckets by the reads of their reduced gradients.

    One read of a segment costs least, and one of a whole small model. A CPU that waits for the last bucket
    has time to read the others: the last one alone is what a step on a slow link still has to read at its
    end.
    """
    if not travels and sums.are_few(_parts(buckets, transports)):
        yield buckets
        return
    for segment in layout.segments:
        own = [bucket for bucket in buckets if bucket.segment is segment]
        waits = travels and layout.device.type == "cpu" and len(own) > 1
        yield from [own[:-1], own[-1:]] if waits else [own]


def _parts(buckets: Sequence[Bucket], transports: Mapping[str, Transport]) -> list[Tensor]:
    """The reduced gradient of these buckets as this rank holds it, flat, by parameter."""
    return [part for bucket in buckets for part in transports[bucket.segment.name].parts(bucket)]


def _replicated(layout: Layout, buckets: Sequence[Bucket], transports: Mapping[str, Transport]) -> Tensor:
    """[parameters] bool: those of segments that are not sharded."""
    whole = [
        not isinstance(transports[bucket.segment.name], ShardedSum)
        for bucket in buckets
        for _ in bucket.slots
    ]
    return torch.tensor(whole, device=layout.device)
