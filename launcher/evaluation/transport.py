"""States of metrics and rows for them as bytes: what the ranks of one job send to each other.

The bytes are those of `torch.save`, and are read by `torch.load(weights_only=True)`: numbers, texts, tensors,
arrays and containers of them arrive bit for bit, and no other class or function can be named. A
defaultdict arrives as a dict, a deque as a list.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import defaultdict, deque
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import default_restore_location, safe_globals

from launcher.errors import ConfigError

# Beside what torch.load allows by itself. Functions of numpy are taken from values, because their names
# differ from one release to the next.
ALLOWED: list[Any] = [
    *(frozenset, complex, bytes, np.ndarray, np.dtype),
    *(np.zeros(1).__reduce__()[0], np.float32(0).__reduce__()[0]),
    *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type)),
]


def serialize(what: str, value: object) -> bytes:
    """The bytes of `value`. Raises ConfigError, which begins with `what`, for what pickle refuses."""
    file = io.BytesIO()
    try:
        torch.save(_compact(value), file)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, RecursionError) as error:
        raise _unsendable(what, str(error)) from error
    return file.getvalue()


def deserialize(what: str, data: bytes, device: torch.device) -> Any:
    """The value. A tensor is created on `device`, or on the host if it was sent from one.

    Raises ConfigError, which begins with `what`, for bytes that name something that is not allowed, which is
    not executed.
    """
    try:
        with safe_globals(ALLOWED):
            return torch.load(io.BytesIO(data), partial(_placed, device), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        text = re.sub(r"(?s).*WeightsUnpickler error: (.*?)\n.*", r"\1", str(error))  # torch adds advice
        named = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", text)
        raise _unsendable(what, f"it has a {named[1]}" if named else text) from error


def _unsendable(what: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be sent to rank 0: {reason}. Numbers, text, bytes, lists, tuples, sets, dicts, "
        "tensors and arrays can. Keep no others in it; of a metric __getstate__ and __setstate__ may "
        "leave them out, and its attribute columns may name those of a batch that it reads."
    )


def _placed(device: torch.device, storage: Any, sender: str) -> Any:
    place = "cpu" if sender == "cpu" else str(device)
    return default_restore_location(storage, place)  # type: ignore[no-untyped-call]


def _compact(value: Any) -> Any:
    """The value in types that torch.load reads, views as copies: torch.save writes their whole storage."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        value = value.detach()
        is_view = value.untyped_storage().nbytes() != value.nbytes
        return value.clone(memory_format=torch.contiguous_format) if is_view else value
    if type(value) in (dict, defaultdict):
        return {name: _compact(each) for name, each in value.items()}
    if type(value) in (list, deque):
        return [_compact(each) for each in value]
    if type(value) is tuple:
        return tuple(map(_compact, value))
    return value
