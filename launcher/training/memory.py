"""Memory of a pass that has failed."""

from __future__ import annotations

import gc

import torch


def free_memory(device: torch.device) -> None:
    """Return what a failed pass held, so that smaller pieces find room."""
    # First: tensors in reference cycles hold blocks that the cache could not return.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
