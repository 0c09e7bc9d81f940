"""A second CUDA stream, for the work after a collective, concurrent with the backward pass.

Owns the events that order it with the stream of the training step; the host never waits. Memory allocated
within its contexts belongs to the side stream and is used only there, so it can be reused as soon as it is
freed. On other devices all calls run inline.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """`after_current`, then any number of `alone`, then `join`; the same in a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority: its work is short, and the next collective waits for it.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def is_concurrent(self) -> bool:
        """Whether there is a second stream: on CUDA."""
        return self._stream is not None

    def after_current(self) -> AbstractContextManager[object]:
        """Run on the side stream, after all work queued on the current stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self.alone()

    def alone(self) -> AbstractContextManager[object]:
        """Run on the side stream, after the work queued there before."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make the current stream wait for all work queued on the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
