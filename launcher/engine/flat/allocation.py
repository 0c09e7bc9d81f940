"""Where flat buffers live: on a CPU in huge pages, where the kernel has them to give.

Owns the allocation of what every update streams through: weights, masters, wire gradients, states. With pages
of 4 KB the processor translates an address for every 1024 fp32 elements of each stream, and its prefetchers
stop there; most tensors of a model are too small for pages of 2 MB, flat buffers are not.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and with 4 KB pages on arm64
MIN_HUGE_PAGES = 8  # of a buffer: below, what is lost to rounding up is not worth it


def flat_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, [numel]."""
    size = math.ceil(numel * dtype.itemsize / HUGE_PAGE) * HUGE_PAGE
    if device.type != "cpu" or size < MIN_HUGE_PAGES * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(numel, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
    with contextlib.suppress(OSError):  # a kernel built without them gives pages like any others
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numel)
