"""The bits of tensors as integers, to compare and to sum them fast."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BYTES = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def words_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor's bits as int64 words [numel // n], and the elements after the last word as integers.

    n is the number of elements in 8 bytes. All elements are in the second part if the tensor is not flat, has
    gaps, or does not begin at a multiple of 8 bytes of its storage. On a CPU torch takes 2 to 6 times as long
    for the same bytes in elements of 2 or 4 bytes.
    """
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    per_word = WORD_BYTES // tensor.element_size()
    if tensor.ndim != 1 or tensor.stride(0) != 1 or tensor.storage_offset() % per_word:
        return torch.empty(0, dtype=torch.int64, device=tensor.device), bits
    end = len(bits) // per_word * per_word
    return bits[:end].view(torch.int64), bits[end:]
