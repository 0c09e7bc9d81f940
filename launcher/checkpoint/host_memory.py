"""Copies of a run's tensors in host memory, which a device makes beside the steps that follow."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopies:
    """The copies of one snapshot: complete once `wait` returns, on whichever thread.

    From a GPU they are asynchronous, into pinned memory. torch keeps pinned memory that is freed, and gives
    it to the next snapshot, so that only the first one waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sources: list[Tensor] = []  # kept alive until they are copied
        self.ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # blocking: the thread that waits for it sleeps and does not spin beside the training.
            self.ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies by name, with the strides of dense tensors. On a GPU they are made after the work queued."""
        if self.ready is None:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            found = {name: self._started(tensor.detach()) for name, tensor in tensors.items()}
            self.ready.record()
        return found

    def _started(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            # Pinned is what was gathered from the ranks, for this snapshot alone; the counters of torch's
            # optimizers are not, and change in place.
            return tensor if tensor.is_pinned() else tensor.clone()
        self._sources.append(tensor)
        copied = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return copied.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait until the device has made the copies."""
        if self.ready is not None:
            self.ready.synchronize()
        self._sources.clear()
