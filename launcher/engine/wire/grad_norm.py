"""Sums of squares of gradients: one read decides overflow, norm and clip factor.

Owns the precision of the accumulation: fp32 for fp16 inputs (65504^2 times 1e28 elements still fits), fp64
for bf16 inputs and for those of fp32 whose squares fp32 cannot hold, so that a sum is not finite if and only
if an element is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, starmap

import torch
from torch import Tensor

CHUNK = 1 << 17  # elements of one dot product in fp32: with more, sums of equal elements lose precision
BLOCKS = (1 << 11, 1 << 9)  # elements that a compiled kernel sums in fp32: long is faster, short fits more
SMALL = 1 << 12  # elements below which parameters are summed together: most vectors
UNDERFLOWS = 1e-18  # a sum in fp32: squares below 1e-38 add nothing to a larger one, of up to 1e13 elements
FEW = 1 << 16  # elements below which a copy in fp64 costs less than calls for chunks
ALL = 1 << 13  # elements of a whole model below which one copy of everything costs less than two
# Below ALL elements a parameter is always summed in one order, alone or with others: the bits of its sum do
# not depend on the bucket that it is in.
IN_CHUNKS, AS_COPY = 0, 1  # how to sum, where it is not by blocks of so many elements

ReadSums = Callable[[], Tensor]  # [parameters] fp64 sums; inf or nan where an element is


class SumOfSquares:
    """Per-parameter sums of squares of flat gradient buffers, with its scratch memory.

    `compiled` reads large parameters on a CPU in one pass instead of two, and adjacent ones together.
    """

    def __init__(self, device: torch.device, compiled: bool = False) -> None:
        self._device = device
        self._kernel = torch.compile(_block_sums) if compiled else None
        self._scratch: dict[torch.dtype, Tensor] = {}

    def over(self, parts: Sequence[Tensor]) -> ReadSums:
        """A function that sums these flat tensors of one dtype, called whenever they are filled in place.

        Everything that is the same in each step is done here: a bucket of 5 MB takes 0.1 ms to read, and a
        dozen calls take as long when a whole model has passed through the caches in between.
        """
        if self.are_few(parts):
            return _sums_of_few(parts)
        wide = torch.float32 if parts[0].dtype == torch.float16 else torch.float64
        if self._device.type != "cpu":
            held = list(parts)
            return lambda: torch.stack(torch._foreach_norm(held, 2, dtype=wide)).double().square()
        readers = [self._over_group(group, wide) for group in _grouped(parts, self._read_together)]

        def all_groups() -> Tensor:
            with torch.no_grad():
                return readers[0]() if len(readers) == 1 else torch.cat([read() for read in readers])

        return all_groups

    def finite_over(self, parts: Sequence[Tensor]) -> ReadSums:
        """A function whose result is not finite if and only if an element is not, without a norm.

        On a CPU the absolute least and greatest element of each stretch, in which torch keeps a nan. Reading
        them takes a quarter of the time of the squares of halves, each of which is widened first.
        """
        if self._device.type != "cpu":
            return self.over(parts)
        held = [part for part in parts if part.numel()]
        stretches = [_stretch(group) for group in _neighbours(held, gap=0)] if held else [torch.zeros(1)]

        def extremes() -> Tensor:
            found = [extreme for stretch in stretches for extreme in torch.aminmax(stretch)]
            return torch.stack(found).double().abs_()

        return extremes

    def are_few(self, parts: Sequence[Tensor]) -> bool:
        """Whether these, a small model, are summed from one copy of everything. They may differ in dtype."""
        return self._device.type == "cpu" and self._kernel is None and sum(map(len, parts)) < ALL

    def _over_group(self, group: list[Tensor], wide: torch.dtype) -> ReadSums:
        whole, method = _stretch(group), self._method(group[0])
        if method == IN_CHUNKS:
            return lambda: self._chunked(whole, wide)[None]
        if method == AS_COPY and len(group) == 1 and len(whole) >= ALL:
            return lambda: whole.double().square_().sum()[None]
        if method == AS_COPY:
            return _sums_of_few(group)
        kernel, blocks = self._kernel, whole.view(-1, method)
        assert kernel is not None
        torch._dynamo.maybe_mark_dynamic(blocks, 0)  # one kernel for all lengths
        torch._dynamo.mark_static(blocks, 1)
        lengths = torch.tensor([part.numel() // method for part in group])
        return lambda: _sums_of(kernel(blocks, wide).double(), lengths)

    def _chunked(self, part: Tensor, wide: torch.dtype) -> Tensor:
        """Sum squares of fp32 in fp32, and again in fp64 if squares may have left its range."""
        if part.dtype == torch.float32:
            total = self._dots(part, torch.float32)
            if UNDERFLOWS < total.item() < math.inf:  # nearly always: widening takes three times as long
                return total
        return self._dots(part, wide)

    def _dots(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Widen, then one dot product: both run at memory speed, unlike norms of fp16 tensors."""
        dots = torch.empty(-(-part.numel() // CHUNK), dtype=dtype)
        for chunk, dot in zip(torch.split(part, CHUNK), dots, strict=True):
            values = chunk
            if chunk.dtype != dtype:
                values = self._scratch_for(dtype)[: chunk.numel()].copy_(chunk)
            torch.dot(values, values, out=dot)
        return dots.double().sum()

    def _scratch_for(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return self._scratch[dtype]

    def _method(self, part: Tensor) -> int:
        """IN_CHUNKS, AS_COPY, or the length of the blocks that a kernel sums."""
        if self._kernel is not None and part.numel() >= SMALL:
            for block in BLOCKS:
                if part.numel() % block == 0:
                    return block
        return AS_COPY if part.numel() < FEW else IN_CHUNKS

    def _read_together(self, before: Tensor, part: Tensor) -> bool:
        """Whether one call sums both: blocks without a gap between them, and small neighbours."""
        gap = _gap(before, part)
        method = self._method(part)
        small = max(before.numel(), part.numel()) < SMALL and 0 <= gap < SMALL
        return small or (method in BLOCKS and method == self._method(before) and gap == 0)


def _sums_of_few(parts: Sequence[Tensor]) -> ReadSums:
    """Sum small parts from one copy of all of them: the bits of `_sums_of` each part by itself."""
    groups = _neighbours(parts)
    stretches = [_stretch(group) for group in groups]
    copy = torch.empty(sum(map(len, stretches)), dtype=torch.float64)
    places = list(torch.split(copy, [len(stretch) for stretch in stretches]))
    gaps = [gap for group in groups for gap in (*starmap(_gap, pairwise(group)), 0)]
    pairs = torch.tensor([(part.numel(), gap) for part, gap in zip(parts, gaps, strict=True)])
    lengths = pairs.flatten() if any(gaps) else pairs[:, 0].contiguous()

    def read() -> Tensor:
        torch._foreach_copy_(places, stretches)
        sums = _sums_of(copy.square_(), lengths)
        return sums if len(sums) == len(parts) else sums[::2]  # [1::2]: what the gaps hold

    return read


def _grouped(parts: Sequence[Tensor], together: Callable[[Tensor, Tensor], bool]) -> list[list[Tensor]]:
    """All parts in order, each in a group with the one before where the two belong `together`."""
    groups = [[parts[0]]]
    for before, part in pairwise(parts):
        if together(before, part):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _neighbours(parts: Sequence[Tensor], gap: int = ALL - 1) -> list[list[Tensor]]:
    """The parts that follow each other in one memory, with gaps of at most so many elements."""
    return _grouped(parts, lambda before, part: 0 <= _gap(before, part) <= gap)


def _block_sums(blocks: Tensor, wide: torch.dtype) -> Tensor:
    """[blocks] sums of squares."""
    return blocks.to(wide).square().sum(dim=1)


def _sums_of(values: Tensor, lengths: Tensor) -> Tensor:
    """[len(lengths)] sums over consecutive parts of `values` with these lengths, which are not checked."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def _gap(before: Tensor, part: Tensor) -> int:
    """Elements between two parts of one memory; -1 where it is not the same memory."""
    if part.untyped_storage().data_ptr() != before.untyped_storage().data_ptr():
        return -1
    return int(part.storage_offset() - before.storage_offset()) - before.numel()


def _stretch(parts: Sequence[Tensor]) -> Tensor:
    """The memory from the first part to the end of the last."""
    first, last = parts[0], parts[-1]
    length = int(last.storage_offset() - first.storage_offset()) + last.numel()
    return first.as_strided((length,), (1,))
