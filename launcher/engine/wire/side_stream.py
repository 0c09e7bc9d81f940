"""A second stream of a GPU, on which what follows a collective runs beside the backward pass.

Owns the events that order it with the stream of the training step; the host waits for nothing. Memory that is
taken within one of its contexts belongs to the side stream and is used there alone, so that it can be reused
as soon as it is let go. On other devices all calls run where they stand.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """`after_current`, then any number of `alone`, then `join`; the same in a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # First in line: what follows is short, and the wire waits for it.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def after_current(self) -> AbstractContextManager[object]:
        """What follows runs on the side, behind all that the current stream has been given until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self.alone()

    def alone(self) -> AbstractContextManager[object]:
        """What follows runs on the side, behind what was given to the side before."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """What the current stream is given from now on runs behind all that the side was given."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
