"""Sums of squares of gradients: the one read that decides overflow, norm and clip factor.

Owns the exact-enough accumulation: fp32 for fp16 inputs (65504^2 times 1e28 elements still fits), fp64 for
bf16 and fp32 inputs, so that a sum is not finite if and only if an element is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 19  # elements: 2 MB of fp32 scratch, which stays in cache; smaller ones cost more calls
DOT = 1 << 17  # elements of one dot product in fp32: more, and equal elements lose digits of the sum
BLOCK = 1 << 9  # elements that the compiled kernel sums in fp32
SMALL = 1 << 12  # elements below which parameters are summed together: most vectors

Look = Callable[[], Tensor]  # [parameters] fp64 sums; inf or nan where an element is


class SumOfSquares:
    """Per-parameter sums of squares of flat gradient buffers, with its scratch memory.

    `compiled` reads large parameters on a CPU in one pass instead of two, side by side where they lie so.
    """

    def __init__(self, device: torch.device, compiled: bool = False) -> None:
        self._device = device
        # One kernel for all lengths: buckets are unequal.
        self._kernel = torch.compile(_block_sums, dynamic=True) if compiled else None
        self._scratch: dict[torch.dtype, Tensor] = {}

    def over(self, parts: Sequence[Tensor]) -> Look:
        """What looks at these flat tensors of one dtype as often as they are filled, in the same memory.

        All that is the same in each step is done here. A bucket of 5 MB takes 0.1 ms to read, and a dozen
        calls take as long where a whole model has gone through the caches since they were last made.
        """
        wide = torch.float32 if parts[0].dtype == torch.float16 else torch.float64
        if self._device.type != "cpu":
            held = list(parts)
            return lambda: torch.stack(torch._foreach_norm(held, 2, dtype=wide)).double().square()
        looks = [self._over_group(group, wide) for group in self._groups(parts)]

        def all_groups() -> Tensor:
            with torch.no_grad():
                return looks[0]() if len(looks) == 1 else torch.cat([look() for look in looks])

        return all_groups

    def _over_group(self, group: list[Tensor], wide: torch.dtype) -> Look:
        whole = _stretch(group)
        if self._in_blocks(group[0]):
            kernel, lengths = self._kernel, torch.tensor([part.numel() // BLOCK for part in group])
            assert kernel is not None
            return lambda: _sums_of(kernel(whole, wide).double(), lengths)
        if group[0].numel() < SMALL:
            pairs = [(part.numel(), gap) for part, gap in zip(group, [*_gaps(group), 0], strict=True)]
            lengths = torch.tensor(pairs).flatten()
            return lambda: _sums_of(whole.double().square_(), lengths)[::2]  # [1::2]: what the gaps hold
        return lambda: torch.stack([self._chunked(part, wide) for part in group])

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

    def _in_blocks(self, part: Tensor) -> bool:
        return self._kernel is not None and part.numel() >= SMALL and part.numel() % BLOCK == 0

    def _groups(self, parts: Sequence[Tensor]) -> Iterable[list[Tensor]]:
        """Neighbours that are summed alike: small ones, and those of whole blocks that lie without a gap."""
        group = [parts[0]]
        for before, part in itertools.pairwise(parts):
            (gap,) = _gaps([before, part])
            small = before.numel() < SMALL and part.numel() < SMALL and 0 <= gap < SMALL
            if small or (self._in_blocks(before) and self._in_blocks(part) and gap == 0):
                group.append(part)
            else:
                yield group
                group = [part]
        yield group


def _block_sums(whole: Tensor, wide: torch.dtype) -> Tensor:
    """Sums of squares of consecutive blocks."""
    return whole.view(-1, BLOCK).to(wide).square().sum(dim=1)


def _sums_of(values: Tensor, lengths: Tensor) -> Tensor:
    """[len(lengths)] sums over consecutive stretches of `values`, which are known to be as long as these."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def _gaps(parts: Sequence[Tensor]) -> list[int]:
    """Elements between neighbours in memory; -1 where it is not the same memory."""
    return [
        int(part.storage_offset() - before.storage_offset()) - before.numel()
        if part.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        else -1
        for before, part in itertools.pairwise(parts)
    ]


def _stretch(parts: Sequence[Tensor]) -> Tensor:
    """The memory from the first part to the end of the last."""
    first, last = parts[0], parts[-1]
    length = int(last.storage_offset() - first.storage_offset()) + last.numel()
    return first.as_strided((length,), (1,))
