"""Writes named tensors to a safetensors file and computes its digest.

Owns the writing: one pass from the tensors to file and digest, without a second copy in memory. Reads with
the safetensors library, which never executes what it reads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from launcher.errors import StorageError

# Dtype names of the format: https://huggingface.co/docs/safetensors
_WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class Written:
    """Size and digest of a file, as written."""

    size_bytes: int
    sha256: str


Run = Callable[[Callable[[], object]], object]  # calls its argument, in whatever thread, and waits for it
_PIECE_BYTES = 8 * 2**20  # about 10 ms of writing and hashing


def directly(work: Callable[[], object]) -> object:
    """A `Run` in this thread."""
    return work()


def write_bytes(path: Path, *parts: bytes | memoryview) -> Written:
    """Create `path` from `parts`; it is on disk before this returns. Raises OSError, also if it exists."""
    with open(path, "xb") as file:
        return _write_through(file, parts, directly)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], run: Run = directly
) -> Written:
    """Create a safetensors file of CPU tensors of any strides; it is on disk before this returns.

    `run` makes each piece of the work: a few MB written and hashed.

    Raises OSError, and StorageError for a dtype that the format does not have.
    """
    # Wide dtypes first, as in the library, so that every tensor is aligned in a mapped file.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        size_bytes = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _word(name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size_bytes],
        }
        offset += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    parts = (
        _bytes_of(tensors[name]) for name in names
    )  # a generator, because non-contiguous tensors are copied
    with open(path, "xb") as file:
        return _write_through(file, itertools.chain((len(text).to_bytes(8, "little"), text), parts), run)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file from `write_tensors`, mapped. Raises StorageError for any other file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read as safetensors: {error}. Only safetensors and JSON are read. "
            "Choose another checkpoint with checkpoint.resume=PATH."
        ) from error
    return found


def described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Dtype and shape by name, for people and for comparison."""
    return {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors.items()}


def _write_through(file: BinaryIO, parts: Iterable[bytes | memoryview], run: Run) -> Written:
    digest, size_bytes = hashlib.sha256(), 0
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            run(partial(_write_piece, file, digest, part[start : start + _PIECE_BYTES]))
        size_bytes += len(part)
    run(partial(_to_disk, file))
    return Written(size_bytes, digest.hexdigest())


def _write_piece(file: BinaryIO, digest: Any, piece: bytes | memoryview) -> None:
    file.write(piece)
    digest.update(piece)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.device.type == "cpu"
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _word(name: str, dtype: torch.dtype) -> str:
    word = _WORDS.get(dtype)
    if word is None:
        raise StorageError(
            f"{name} is {dtype}, which a checkpoint cannot hold. "
            f"It holds {', '.join(str(known).removeprefix('torch.') for known in _WORDS)}."
        )
    return word
