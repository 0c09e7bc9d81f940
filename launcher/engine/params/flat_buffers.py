"""What lies where in the flat memory of a model's parameters.

Owns offsets, and views of flat tensors by parameter. Moves no tensor; `flat_params` builds it. In the engine
`param` is a ParamRange, and `p` or `parameter` torch's own.

    FlatBuffer   all parameters of one kind: weights, masters, gradients, each one long tensor
      BucketRange   those of them that are sent together
        ParamRange    one of them
    Shard        what one rank updates: a FlatBuffer, or its part of each BucketRange (ZeRO-1)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ParamRange:
    """One parameter's place: `numel` elements from `offset` in each tensor of its flat buffer."""

    name: str
    index: int  # position in the order of all parameters of a layout
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    numel: int

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor, in the parameter's shape and memory format."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def flat(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor in memory order, [numel]."""
        return flat[self.offset : self.offset + self.numel]

    def in_memory_order(self, values: Tensor) -> Tensor:
        """Values of this shape as they are in a flat tensor, [numel]; a view where they can be."""
        if values.stride() == self.stride:
            return values.as_strided((self.numel,), (1,))
        ordered = values.new_empty(self.numel)
        ordered.as_strided(self.shape, self.stride).copy_(values)
        return ordered

    def within(self, part: slice) -> slice:
        """The elements of `part` of a flat tensor that are this parameter's, from the part's start."""
        start = max(self.offset, part.start) - part.start
        return slice(start, max(start, min(self.offset + self.numel, part.stop) - part.start))


@dataclass(frozen=True)
class BucketRange:
    """Adjacent parameters that are sent together: elements [start, end) of a flat buffer.

    The length is a multiple of ALIGNMENT times the number of ranks: each rank can own an equal,
    aligned shard.
    """

    params: tuple[ParamRange, ...]
    start: int
    end: int

    def gaps(self) -> list[slice]:
        """The elements that belong to no parameter: the padding after each."""
        ends = [param.offset + param.numel for param in self.params]
        nexts = [*(param.offset for param in self.params[1:]), self.end]
        return [slice(end, begin) for end, begin in zip(ends, nexts, strict=True) if end < begin]

    def shard(self, rank: int, world_size: int) -> slice:
        """The elements that `rank` owns where the optimizer is sharded."""
        length = (self.end - self.start) // world_size
        return slice(self.start + rank * length, self.start + (rank + 1) * length)


@dataclass
class Shard:
    """What one rank updates: flat tensors of equal length.

    `weight` is what the model computes with; `master` is fp32, the same tensor as `weight` where the weights
    are fp32, and None where a policy has no masters; `grad` is the reduced gradient, in `gradient_dtype`
    or its fp32 sum.
    """

    weight: Tensor
    master: Tensor | None
    grad: Tensor

    @property
    def half(self) -> bool:
        """Whether the model's weights are half: rounded copies of the masters, or without any."""
        return self.weight.dtype != torch.float32

    def part(self, elements: slice) -> Shard:
        """The same of some of the elements."""
        weight, master = self.weight[elements], self.master
        if master is not None:
            master = master[elements] if self.half else weight
        return Shard(weight, master, self.grad[elements])

    def main_params(self) -> Tensor:
        """The masters, or the widened weights where there are none."""
        return self.weight.float() if self.master is None else self.master


@dataclass
class FlatBuffer(Shard):
    """The parameters of one kind. Buffers are flat, `numel` elements long, padding included."""

    name: str
    bucket_ranges: list[BucketRange]

    @property
    def params(self) -> list[ParamRange]:
        return [param for bucket_range in self.bucket_ranges for param in bucket_range.params]

    @property
    def numel(self) -> int:
        return self.weight.numel()

    def named(self, kind: str, flat: Tensor, by_parameter: bool) -> dict[str, Tensor]:
        """One of its flat tensors by readable name: in parts, or whole with its padding."""
        if by_parameter:
            return {f"{param.name} ({kind})": param.flat(flat) for param in self.params}
        return {f"{self.name} ({kind})": flat}
