"""States of metrics and rows for them as bytes: what the ranks of one job send to each other.

Owns the encoding, which is `pickle` without its freedom: the receiver looks up no name but those that its own
metric had before the first batch, so a message cannot name other code. The class of a metric is not sent at
all, since no other process may find it by name.

Numbers, tensors and arrays keep their bits. A view is sent without the rest of its storage.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


class CannotSendError(TypeError):
    """A value that cannot be sent, or not be received. The text names its type."""


@dataclass(frozen=True)
class Known:
    """What a message may consist of besides numbers, texts and containers."""

    own: type  # the class of the metric
    names: frozenset[tuple[str, str]]  # module and name of other classes and of functions


def known_of(value: object) -> Known:
    """What `value` consists of. Raises CannotSendError where it cannot be sent."""
    unpickler = _Unpickler(packed(value, Known(type(value), frozenset())), type(value), torch.device("cpu"))
    unpickler.load()
    return Known(type(value), frozenset(unpickler.looked_up))


def packed(value: object, known: Known) -> bytes:
    """The bytes of `value`. Raises CannotSendError for what pickle refuses."""
    file = io.BytesIO()
    try:
        _Pickler(file, known.own).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        # What a __getstate__ raises is left as it is. RuntimeError: of an object that pybind11 has made.
        if not isinstance(error, pickle.PicklingError | RecursionError) and "pickl" not in str(error):
            raise
        raise CannotSendError(str(error)) from error
    return file.getvalue()


def unpacked(data: bytes, known: Known, device: torch.device) -> object:
    """The inverse of `packed`, with the receiver's `known`.

    A tensor is created on `device`, or on the host if it was sent from one. Raises CannotSendError for bytes
    that name something unknown.
    """
    return _Unpickler(data, known.own, device, known.names | PLAIN.names).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, own: type) -> None:
        super().__init__(file, protocol=5)
        self._own = own

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        """What is sent instead of `value`; None: what pickle sends."""
        if value is self._own:
            return ("class",)
        if isinstance(value, torch.device):
            return "device", value.type == "cpu"
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise pickle.PicklingError(f"a tensor is {value.layout}, {value.dtype}, which is not dense")
            # A view may have any stride.
            host = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
            content = host.view(-1).view(torch.uint8).numpy().tobytes()
            return "tensor", value.device, value.dtype, tuple(value.shape), content
        return None


class _Unpickler(pickle.Unpickler):
    """`names` are those that may be looked up; None: all, which then are in `looked_up`."""

    def __init__(
        self, data: bytes, own: type, device: torch.device, names: frozenset[tuple[str, str]] | None = None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._own, self._device, self._names = own, device, names
        self.looked_up: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> object:
        if self._names is not None and (module, name) not in self._names:
            raise CannotSendError(f"it has a {module}.{name}, which it had not before the first batch")
        self.looked_up.add((module, name))
        return super().find_class(module, name)

    def persistent_load(self, sent: Any) -> object:
        kind, *parts = sent
        if kind == "class":
            return self._own
        if kind == "device":
            return torch.device("cpu") if parts[0] else self._device
        device, dtype, shape, content = parts
        plain = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return plain.view(shape).to(device)


# Taken from values, because numpy names its functions differently in each release.
PLAIN = known_of(
    (
        *(bool, int, float, complex, str, bytes, list, dict, tuple, set, frozenset, bytearray),
        *(0j, bytearray(), Counter(), OrderedDict(), defaultdict(), deque(), torch.Size()),
        *(np.zeros(1), np.zeros((2, 2))[:, 0], np.zeros((2, 2)).T, np.array([{}]), np.float32(0)),
        *(each for each in vars(torch).values() if isinstance(each, torch.dtype)),
    )
)
