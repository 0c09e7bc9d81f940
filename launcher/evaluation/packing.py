"""Objects of this job's own ranks as bytes: metrics and what they read.

Owns the encoding. A tensor arrives on the receiver's device, or on its host if it came from one, and a view
travels without the rest of its storage. Only what ranks of one job send to each other is ever unpacked: it
is a pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def packed(value: object, classes: Sequence[type] = ()) -> bytes:
    """Raises what pickle raises for what cannot be sent.

    `classes` are known to both sides by their place, and need not be found by their name: those that a
    recipe defines inside a function, for instance.
    """
    buffer = io.BytesIO()
    _Packer(buffer, classes).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes, device: torch.device, classes: Sequence[type] = ()) -> Any:
    """The inverse of `packed`, with the same classes in the same order."""
    return _Unpacker(data, device, classes).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, classes: Sequence[type]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._classes = classes

    def persistent_id(self, value: Any) -> object:
        """What stands for a class, or for a tensor; None for all that pickle writes by itself."""
        if isinstance(value, type):
            return self._classes.index(value) if value in self._classes else None
        if not isinstance(value, Tensor):
            return None
        host = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())  # a view may have any stride
        content = host.view(-1).view(torch.uint8).numpy().tobytes()
        return content, value.dtype, tuple(value.shape), value.device.type == "cpu"


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, device: torch.device, classes: Sequence[type]) -> None:
        super().__init__(io.BytesIO(data))
        self._device = device
        self._classes = classes

    def persistent_load(self, stands_for: Any) -> Any:
        if isinstance(stands_for, int):
            return self._classes[stands_for]
        content, dtype, shape, on_host = stands_for
        if not content:
            return torch.empty(shape, dtype=dtype, device="cpu" if on_host else self._device)
        found = torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
        return found if on_host else found.to(self._device)
