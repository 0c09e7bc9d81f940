"""Sums of squares of gradients: the one read that decides overflow, norm and clip factor.

Owns the exact-enough accumulation: fp32 for fp16 inputs (65504^2 times 1e28 elements still fits), fp64 for
bf16 and fp32 inputs, so that a sum is not finite if and only if an element is not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 19  # elements: 2 MB of fp32 scratch, which stays in cache; smaller ones cost more calls
DOT = 1 << 17  # elements of one dot product in fp32: more, and equal elements lose digits of the sum
SMALL = 1 << 12  # elements below which parameters are summed together: most vectors
BLOCK = (16, 32)  # rows that a compiled kernel adds before it sums over the columns


class SumOfSquares:
    """Per-parameter sums of squares of flat gradient buffers, with its scratch memory.

    `compiled` reads large parameters on a CPU in one pass instead of two, side by side where they lie so.
    """

    def __init__(self, device: torch.device, compiled: bool = False) -> None:
        self._device = device
        # One kernel for all lengths: buckets are unequal.
        self._kernel = torch.compile(_block_sums, dynamic=True) if compiled else None
        self._scratch: dict[torch.dtype, Tensor] = {}

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """[len(parts)] fp64 sums over flat tensors of one dtype; inf or nan where an element is."""
        wide = torch.float32 if parts[0].dtype == torch.float16 else torch.float64
        if self._device.type == "cpu":
            with torch.no_grad():
                return torch.cat([self._cpu(group, wide) for group in _groups(parts)])
        return torch.stack(torch._foreach_norm(list(parts), 2, dtype=wide)).double().square()

    def _cpu(self, group: list[Tensor], wide: torch.dtype) -> Tensor:
        if group[0].numel() < SMALL:
            return _sums_of(torch.cat(group).double().square_(), [part.numel() for part in group])
        if self._kernel is None or not _in_blocks(group[0]):
            return torch.stack([self._chunked(part, wide) for part in group])
        whole = group[0].as_strided((sum(part.numel() for part in group),), (1,))
        lengths = [part.numel() // math.prod(BLOCK) for part in group]
        return _sums_of(self._kernel(whole, wide), lengths)

    def _chunked(self, part: Tensor, wide: torch.dtype) -> Tensor:
        """Widen, then one dot product: both run at memory speed, unlike norms of fp16 tensors."""
        dots = torch.empty(-(-part.numel() // DOT), dtype=wide)
        out = iter(dots.unbind())
        for chunk in torch.split(part, CHUNK):
            scratch = self._scratch_for(wide)[: chunk.numel()].copy_(chunk)
            for factor in torch.split(scratch, DOT):
                torch.dot(factor, factor, out=next(out))
        return dots.double().sum()

    def _scratch_for(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return self._scratch[dtype]


def _block_sums(whole: Tensor, wide: torch.dtype) -> Tensor:
    """fp64 sums of squares of consecutive blocks. The rows of a block are added one by one: they go through
    the processor side by side, where the terms of one long sum would wait for each other."""
    rows = whole.view(-1, *BLOCK).unbind(dim=1)
    squares = rows[0].to(wide).square()
    for row in rows[1:]:
        squares = squares + row.to(wide).square()
    return squares.sum(dim=1).double()


def _sums_of(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[len(lengths)] sums over consecutive stretches of `values`."""
    return torch.segment_reduce(values, "sum", lengths=torch.tensor(lengths))


def _in_blocks(part: Tensor) -> bool:
    return part.numel() >= SMALL and part.numel() % math.prod(BLOCK) == 0


def _groups(parts: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Neighbours that are summed alike: small ones, and those of whole blocks that lie without a gap."""
    group = [parts[0]]
    for before, part in itertools.pairwise(parts):
        small = before.numel() < SMALL and part.numel() < SMALL
        gap = part.data_ptr() - before.data_ptr() - before.numel() * before.element_size()
        if small or (_in_blocks(before) and _in_blocks(part) and gap == 0):
            group.append(part)
        else:
            yield group
            group = [part]
    yield group
