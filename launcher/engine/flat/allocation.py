"""Flat buffers: allocated on a CPU in huge pages, if the kernel provides them, and filled in one thread.

Every update streams through these buffers: weights, masters, wire gradients, states. With 4 KB pages each
stream needs an address translation every 1024 fp32 elements, and hardware prefetchers stop there. Most
tensors of a model are too small for 2 MB pages; flat buffers are not.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and with 4 KB pages on arm64
MIN_HUGE_PAGES = 8  # smaller buffers would lose too much to rounding up


def flat_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, [numel]."""
    size = math.ceil(numel * dtype.itemsize / HUGE_PAGE) * HUGE_PAGE
    if device.type != "cpu" or size < MIN_HUGE_PAGES * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(numel, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
    with contextlib.suppress(OSError):  # a kernel built without huge pages gives normal ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operations of this context in the calling thread.

    For copies of one parameter each, which take less than a millisecond. One thread nearly reaches the speed
    of the memory. Where other processes want the processors, the wait for a second one took 20 times as long.
    """
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)
