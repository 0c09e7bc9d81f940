"""The way of a batch from the host to the device."""

from __future__ import annotations

import torch
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}


def batch_to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The columns of a batch on the CPU, each by `to_device`."""
    return batch if device.type == "cpu" else {name: to_device(each, device) for name, each in batch.items()}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy on a separate stream, so that the copy does not wait for what the device is still computing."""
    if device.type != "cuda":
        return tensor.to(device)
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = _streams[device]
    with torch.cuda.stream(stream):
        # From memory that is not pinned the copy would make the host wait.
        moved = tensor.pin_memory().to(device, non_blocking=True)
    current = torch.cuda.current_stream(device)
    current.wait_stream(stream)
    # It was allocated on the other stream: its memory may be reused only after this one has read it.
    moved.record_stream(current)
    return moved
