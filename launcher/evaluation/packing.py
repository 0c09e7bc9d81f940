"""Plain values, tensors and arrays as bytes and back: what ranks of one job send to each other.

Owns the encoding: a JSON header of tagged values, and behind it the content of tensors and arrays. Neither
code nor the name of a class is sent. `unpacked` creates an object only of the class that an object of the
receiver has at the same place.

Floats, integers, tensors and arrays keep their bits; a NaN outside of a list, tensor or array becomes the
default NaN. A view is sent without the rest of its storage. Two references to one object become two objects.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from launcher.evaluation.objects import CannotPackError, built, outline_of, parts_of

HEADER = struct.Struct("<Q")  # size of the JSON text in bytes
MAX_DEPTH = 64  # of containers in each other
NATIVE: frozenset[type] = frozenset({NoneType, bool, str})  # the same in JSON
SEQUENCES: dict[str, type] = {
    kind.__name__: kind for kind in (tuple, set, frozenset, bytearray, torch.Size, deque)
}
MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, Counter, OrderedDict, defaultdict)}
CLASSES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, *SEQUENCES.values())
} | MAPPINGS
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
ARRAY_KINDS = "biufcSUmM"  # of numpy's dtypes: all but objects and records

Named = Callable[[Any], str]  # how an error names an item by its key


def packed(value: Any, like: Any = None) -> bytes:
    """The bytes of `value`. Raises CannotPackError for what has no encoding.

    `like` is the Outline or a deep copy of an earlier `value`, made by the same code on both sides. An object
    has an encoding if `like` has one of the same class at the same place, or if it is immutable and the same
    there (a function, a class, a member of an enum).
    """
    packer = _Packer()
    text = json.dumps(packer.encode(value, like), separators=(",", ":")).encode()
    return b"".join([HEADER.pack(len(text)), text, packer.content])


def unpacked(data: bytes, device: torch.device, like: Any = None) -> Any:
    """The inverse of `packed`, with the same `like`.

    A tensor is created on `device`, or on the host if it was sent from one. Raises ValueError or KeyError for
    bytes that `packed` did not write.
    """
    (size,) = HEADER.unpack_from(data)
    start = HEADER.size + size
    return _Unpacker(memoryview(data)[start:], device).decode(json.loads(data[HEADER.size : start]), like)


class _Packer:
    def __init__(self) -> None:
        self.content = bytearray()
        self._depth = 0

    def encode(self, value: Any, like: Any) -> Any:
        """What stands for `value` in JSON."""
        kind: type = type(value)
        if kind in NATIVE or kind is float:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if kind is list:
            return self._list(value, like)
        if kind.__name__ in MAPPINGS and kind is MAPPINGS[kind.__name__]:
            return {kind.__name__: self._mapping(value, like)}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value)
        return self._other(value, kind, like)

    def _other(self, value: Any, kind: type, like: Any) -> Any:
        if kind is bytes:
            return {"bytes": self._add(value)}
        if kind is complex:
            return {"complex": self._list([value.real, value.imag], None)}
        if kind is torch.dtype:
            return {"dtype": str(value)}
        if kind is torch.device:
            return {"device": value.type == "cpu"}
        if isinstance(value, type) and CLASSES.get(value.__name__) is value:
            return {"class": value.__name__}
        if SEQUENCES.get(kind.__name__) is kind:
            more = [value.maxlen] if kind is deque else []
            return {kind.__name__: [self._list(list(value), like), *more]}
        return self._object(value, kind, like)

    def _object(self, value: Any, kind: type, like: Any) -> Any:
        if value is like:  # copy.deepcopy has returned the value itself: it cannot change
            return {"same": None}
        known = outline_of(like)
        parts = parts_of(value) if known and known.kind is kind else None
        if parts is None or known is None:
            raise CannotPackError(value)
        return {"object": [self._part(*each) for each in zip(parts, known.parts, strict=True)]}

    def _part(self, part: Any, like: Any) -> Any:
        """Attributes are named as such in errors."""
        named = type(part) is dict and all(isinstance(key, str) and key.isidentifier() for key in part)
        return {"dict": self._mapping(part, like, ".{}".format)} if named else self.encode(part, like)

    def _list(self, values: Sequence[Any], like: Any) -> Any:
        """Numbers of one type as an array: lists of outputs may be long."""
        kinds = set(map(type, values))
        if kinds == {float}:
            return {"floats": self._add(array("d", values).tobytes())}
        if kinds == {int}:
            try:
                return {"ints": self._add(array("q", values).tobytes())}
            except OverflowError:
                pass
        if kinds <= NATIVE:
            return list(values)
        return self._items(enumerate(values), _by_index(like), "[{}]".format)

    def _mapping(self, value: Mapping[Any, Any], like: Any, named: Named = "[{!r}]".format) -> list[Any]:
        likes = like if isinstance(like, Mapping) else {}
        plain = set(map(type, value.values())) in ({float}, {int})
        of_values = (
            self._list(list(value.values()), None) if plain else self._items(value.items(), likes, named)
        )
        found = [self._list(list(value), None), of_values]
        if isinstance(value, defaultdict):
            found.append(self.encode(value.default_factory, getattr(like, "default_factory", None)))
        return found

    def _items(self, items: Iterable[tuple[Any, Any]], likes: Mapping[Any, Any], named: Named) -> list[Any]:
        self._depth += 1
        found = []
        for key, value in items:
            try:
                if self._depth > MAX_DEPTH:
                    raise CannotPackError(value, f", more than {MAX_DEPTH} levels deep or within itself")
                found.append(self.encode(value, likes.get(key)))
            except CannotPackError as error:
                error.place.insert(0, named(key))
                raise
        self._depth -= 1
        return found

    def _tensor(self, value: Tensor) -> Any:
        if value.layout is not torch.strided or value.is_quantized:
            raise CannotPackError(value, f" ({value.layout}, {value.dtype}), which is not dense")
        host = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())  # a view may have any stride
        content = host.view(-1).view(torch.uint8).numpy()
        return {
            "tensor": [
                str(value.dtype),
                list(value.shape),
                value.device.type == "cpu",
                self._add(content.tobytes()),
            ]
        }

    def _array(self, value: Any) -> Any:
        if value.dtype.kind not in ARRAY_KINDS:
            raise CannotPackError(value, f" ({value.dtype})")
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        return {tag: [value.dtype.str, list(value.shape), self._add(value.tobytes())]}

    def _add(self, content: bytes) -> list[int]:
        """Where the content is found: [first, last + 1]."""
        first = len(self.content)
        self.content += content
        return [first, len(self.content)]


class _Unpacker:
    def __init__(self, content: memoryview, device: torch.device) -> None:
        self._content = content
        self._device = device

    def decode(self, node: Any, like: Any) -> Any:
        """The value that `node` stands for."""
        if isinstance(node, list):
            likes = _by_index(like)
            return [self.decode(each, likes.get(index)) for index, each in enumerate(node)]
        if not isinstance(node, dict):
            return node
        ((tag, payload),) = node.items()
        if tag in ("floats", "ints"):
            return array("d" if tag == "floats" else "q", self._bytes(payload)).tolist()
        if tag in MAPPINGS:
            return self._mapping(tag, payload, like)
        if tag == "tensor":
            return self._tensor(*payload)
        if tag in ("array", "scalar"):
            return self._array(tag, *payload)
        if tag in SEQUENCES:
            values, *more = payload
            return SEQUENCES[tag](self.decode(values, like), *more)
        if tag == "object":
            return self._object(payload, like)
        return like if tag == "same" else self._scalar(tag, payload)

    def _object(self, nodes: Sequence[Any], like: Any) -> Any:
        known = outline_of(like)
        if known is None:
            raise ValueError(f"an object was sent for {like!r}, which is none: the ranks run different code")
        parts = [self.decode(node, each) for node, each in zip(nodes, known.parts, strict=True)]
        return built(known.kind, parts)

    def _scalar(self, tag: str, payload: Any) -> Any:
        if tag == "int":
            return int(payload, 16)
        if tag == "bytes":
            return self._bytes(payload)
        if tag == "complex":
            return complex(*self.decode(payload, None))
        if tag == "device":
            return torch.device("cpu") if payload else self._device
        named: dict[str, Mapping[str, object]] = {"dtype": DTYPES, "class": CLASSES}
        return named[tag][payload]

    def _mapping(self, tag: str, payload: Sequence[Any], like: Any) -> Any:
        keys, values, *factory = payload
        likes = like if isinstance(like, Mapping) else {}
        keys = self.decode(keys, None)
        if isinstance(values, dict):
            found = self.decode(values, None)
        else:
            found = [self.decode(node, likes.get(key)) for key, node in zip(keys, values, strict=True)]
        pairs = dict(zip(keys, found, strict=True))
        made = [self.decode(each, getattr(like, "default_factory", None)) for each in factory]
        return MAPPINGS[tag](*made, pairs)

    def _tensor(self, dtype: str, shape: Sequence[int], on_host: bool, where: Sequence[int]) -> Tensor:
        device = torch.device("cpu") if on_host else self._device
        content = bytearray(self._bytes(where))
        if not content:
            return torch.empty(shape, dtype=DTYPES[dtype], device=device)
        return torch.frombuffer(content, dtype=DTYPES[dtype]).view(shape).to(device)

    def _array(self, tag: str, dtype: str, shape: Sequence[int], where: Sequence[int]) -> Any:
        found = np.dtype(dtype)
        if found.kind not in ARRAY_KINDS:
            raise ValueError(f"an array of {found} cannot be received")
        made = np.frombuffer(self._bytes(where), found).reshape(shape)
        return made.copy() if tag == "array" else made[()]

    def _bytes(self, where: Sequence[int]) -> bytes:
        return bytes(self._content[slice(*where)])


def _by_index(like: Any) -> Mapping[Any, Any]:
    return dict(enumerate(like)) if isinstance(like, list | tuple | deque) else {}
