"""A bucket of gradients: parameters whose gradients are sent between ranks in one message.

Owns what is known of a bucket within a step, and what a bucket asks of its collective. `collectives` has the
two kinds, the reducer their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from launcher.engine.grads.copy_in import CopyIn
from launcher.engine.params.flat_buffers import BucketRange, FlatBuffer, ParamRange


@dataclass
class Bucket:
    """Adjacent parameters of a flat buffer, and the message of their gradients.

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


class Collective:
    """Sends the buckets of one flat buffer; `send_multiplier`, a power of two, multiplies what is sent."""

    send_multiplier = 1.0

    def clear_padding(self, bucket: Bucket) -> None:
        """Zero what a message holds between parameters, where that is not zero anyway."""

    def start(self, bucket: Bucket) -> int:
        """Start sending; returns the bytes, counted as those of an all-reduce of the same traffic."""
        raise NotImplementedError

    def wait(self, bucket: Bucket) -> None:
        """Wait for the sum over the ranks (on CUDA: make the current stream wait)."""
        raise NotImplementedError

    def parts(self, bucket: Bucket) -> list[Tensor]:
        """The reduced gradient as this rank holds it, flat, by parameter of the bucket."""
        return [param.flat(bucket.flat_buffer.grad) for param in bucket.params]
