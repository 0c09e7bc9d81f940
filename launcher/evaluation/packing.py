"""Objects of this job's own ranks as bytes: metrics and what they read.

Owns the encoding. Tensors arrive on the host, whatever device they were on, and a view travels without the
rest of its storage. Only what ranks of one job send to each other is ever unpacked: it is a pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, cast

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


def unpacked(data: bytes, classes: Sequence[type] = ()) -> Any:
    """The inverse of `packed`, with the same classes in the same order."""
    return _Unpacker(io.BytesIO(data), classes).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, classes: Sequence[type]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._classes = classes

    def persistent_id(self, value: Any) -> int | None:
        return self._classes.index(value) if isinstance(value, type) and value in self._classes else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        host = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())  # a view has odd strides
        return _tensor, (host.view(-1).view(torch.uint8).numpy().tobytes(), host.dtype, tuple(host.shape))


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, classes: Sequence[type]) -> None:
        super().__init__(file)
        self._classes = classes

    def persistent_load(self, index: object) -> type:
        return self._classes[cast(int, index)]


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
