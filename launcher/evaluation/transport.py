"""States of metrics and rows for them as bytes: what the ranks of one job send to each other.

Owns the encoding, which is Python's protocol of copying (`pickle`) without its names. A class or function is
sent as a number into `Known`, which each rank collects from its own objects: a message cannot name code, and
`unpacked` creates an object only of a class that the receiver's metric had before its first batch. Classes
that no other process could find by name, as those of a recipe's file, are sent in the same way.

Numbers, tensors and arrays keep their bits. A view is sent without the rest of its storage.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, EllipsisType, FunctionType, ModuleType, NotImplementedType
from typing import Any

import numpy as np
import torch
from torch import Tensor

Known = dict[str, object]  # classes and functions by name, the same names on all ranks
PLAIN: Known = {}  # what a value may always consist of
CONSTANTS = EllipsisType | NotImplementedType | torch.memory_format
# Code of torch, which it cannot pickle.
OPERATORS = type(torch.ops.aten.add) | type(torch.ops.aten.add.Tensor)
LEVELS_SHOWN = 6  # of the place of the part that cannot be sent, in an error


class CannotSendError(TypeError):
    """A value that cannot be sent. The text names its place within the whole, and its type."""


def known_of(value: object) -> Known:
    """The classes and functions in `value`. Raises CannotSendError where it cannot be sent at all."""
    known = dict(PLAIN)
    with _explained(value, known):
        _Collector(known).dump(value)
    return known


def packed(value: object, known: Known) -> bytes:
    """The bytes of `value`. Raises CannotSendError for what is neither plain nor made of what is `known`."""
    with _explained(value, known):
        return _dumped(value, known)


def unpacked(data: bytes, known: Known, device: torch.device) -> object:
    """The inverse of `packed`, with the receiver's `known`.

    A tensor is created on `device`, or on the host if it was sent from one. Raises UnpicklingError for bytes
    that name code or something unknown.
    """
    return _Unpickler(data, known, device).load()


class _Unknown(TypeError):
    """A class or function that the receiver may not have, or a tensor without plain memory."""


def _stand_in(kind: str, *parts: object) -> object:
    """The only name in a message. The receiver calls `_Unpickler.received` in its place."""
    raise AssertionError("a message was read by another unpickler")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file, protocol=5)
        self._names = names  # by id

    def reducer_override(self, value: Any) -> Any:
        """What is sent instead of `value`. Not called for numbers and texts, of which there may be many."""
        if isinstance(value, Tensor):
            return _stand_in, ("tensor", value.dtype, list(value.shape), value.device, _content_of(value))
        if isinstance(value, torch.dtype):
            return _stand_in, ("dtype", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return _stand_in, ("device", value.type == "cpu")
        if _is_code(value) and value is not _stand_in:
            return _stand_in, ("known", self._name_of(value))
        return NotImplemented

    def _name_of(self, value: object) -> str:
        name = self._names.get(id(value))
        if name is None:
            raise _Unknown
        return name


class _Collector(_Pickler):
    """Collects classes and functions; writes what nobody reads."""

    def __init__(self, known: Known) -> None:
        super().__init__(io.BytesIO(), {})
        self._known = known

    def _name_of(self, value: Any) -> str:
        own = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or repr(value)
        name = f"{getattr(value, '__module__', None)}.{own}"
        while self._known.setdefault(name, value) is not value:
            name += "'"  # two of the same name, as two lambdas of a function
        return name


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Known, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._known, self._device = known, device

    def find_class(self, module: str, name: str) -> object:
        if (module, name) != (__name__, _stand_in.__name__):
            raise pickle.UnpicklingError(f"{module}.{name} was sent by name")
        return self._received

    def _received(self, kind: str, *parts: Any) -> Any:
        if kind == "tensor":
            dtype, shape, device, content = parts
            plain = (
                torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
            )
            return plain.view(shape).to(device)
        (name,) = parts
        if kind == "device":
            return torch.device("cpu") if name else self._device
        if kind == "dtype":
            found = vars(torch).get(name)
            found = found if isinstance(found, torch.dtype) else None
        else:
            found = self._known.get(name) if kind == "known" else None
        if found is None:
            raise pickle.UnpicklingError(f"{name} is not known here: the ranks run different code")
        return found


def _dumped(value: object, known: Known) -> bytes:
    file = io.BytesIO()
    _Pickler(file, {id(each): name for name, each in known.items()}).dump(value)
    return file.getvalue()


@contextmanager
def _explained(value: object, known: Known) -> Iterator[None]:
    """Raise CannotSendError for what pickle says. What a __getstate__ raises is left as it is."""
    try:
        yield
    except (_Unknown, pickle.PicklingError, TypeError, RuntimeError) as error:
        # As of an object without a state; of one that pybind11 has made.
        if type(error) in (TypeError, RuntimeError) and "pickle" not in str(error):
            raise
        raise _complaint(value, known) from error


def _is_code(value: object) -> bool:
    """Whether it is a class, a function or a constant of C. A method of an object is sent with the object."""
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, ModuleType | type | None)
    if isinstance(value, type | FunctionType | np.ufunc | OPERATORS | CONSTANTS):
        return True
    # Such as numpy.mean, and what functools.cache returns: pickle would send their names.
    return callable(value) and hasattr(value, "__qualname__") and isinstance(value.__reduce_ex__(5), str)


def _content_of(value: Tensor) -> bytes:
    if value.layout is not torch.strided or value.is_quantized:
        raise _Unknown
    host = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())  # a view may have any stride
    return host.view(-1).view(torch.uint8).numpy().tobytes()


def _complaint(value: object, known: Known) -> CannotSendError:
    """Names the outermost part whose class is unknown, or the innermost one that cannot be sent."""
    place = ""
    for _ in range(LEVELS_SHOWN):
        refused = ((name, part) for name, part in _children(value) if not _is_sendable(part, known))
        if not _is_sendable(type(value), known) or (first := next(refused, None)) is None:
            break
        place, value = place + first[0], first[1]
    else:
        place += "..."
    why = f" ({value.layout}, {value.dtype}), which is not dense" if isinstance(value, Tensor) else ""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return CannotSendError(f"{place.lstrip('.') or 'the value'} is of the type {kind}{why}")


def _is_sendable(value: object, known: Known) -> bool:
    try:
        return bool(_dumped(value, known))
    except Exception:  # of any __getstate__
        return False


def _children(value: Any) -> Iterator[tuple[str, object]]:
    """The parts of a container or an object, each with its place. Attributes are named as such."""
    if isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
        yield ".default_factory", getattr(value, "default_factory", None)
    if not _is_code(value):
        with suppress(Exception):
            yield from ((f".{name}", each) for name, each in value.__getstate__().items())


# Collected from values, because numpy names its functions differently in each release.
_Collector(PLAIN).dump(
    (
        *(bool, int, float, complex, str, bytes, list, dict, tuple, set, frozenset, bytearray),
        *(Counter(), OrderedDict(), defaultdict(), deque(), torch.Size()),
        *(np.zeros(1), np.zeros((2, 2))[:, 0], np.zeros((2, 2)).T, np.array([{}]), np.float32(0)),
    )
)
