"""Sums of squares of gradients: the one read that decides overflow, norm and clip factor.

Owns the exact-enough accumulation: fp32 for fp16 inputs (65504^2 times 1e28 elements still fits), fp64 for
bf16 and fp32 inputs, so that a sum is not finite if and only if an element is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from launcher.engine.layout import Slot

CHUNK = 1 << 17  # elements: half a MB of fp32 scratch, which stays in the second-level cache


class SumOfSquares:
    """Per-parameter sums of squares of flat gradient buffers, with its scratch memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch: dict[torch.dtype, Tensor] = {}

    def __call__(self, flat: Tensor, slots: Sequence[Slot]) -> Tensor:
        """[len(slots)] fp64 sums over each slot's part of `flat`; inf or nan where an element is."""
        parts = [slot.flat(flat) for slot in slots]
        if self._device.type == "cpu":
            return torch.stack([self._cpu(part) for part in parts])
        wide = torch.float32 if flat.dtype == torch.float16 else torch.float64
        return torch.stack(torch._foreach_norm(parts, 2, dtype=wide)).double().square()

    def _cpu(self, part: Tensor) -> Tensor:
        """Widen a chunk, then one dot product: both run at memory speed, unlike norms of fp16 tensors."""
        wide = torch.float32 if part.dtype == torch.float16 else torch.float64
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, part.numel(), CHUNK):
            chunk = part[start : start + CHUNK]
            scratch = self._scratch_for(wide)[: chunk.numel()]
            scratch.copy_(chunk)
            total += torch.dot(scratch, scratch)
        return total

    def _scratch_for(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return self._scratch[dtype]
