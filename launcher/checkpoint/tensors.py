"""Writes named tensors to a safetensors file and computes its digest.

Owns the writing: one pass from the tensors to file and digest, without a second copy in memory. Reads with
the safetensors library, which never executes what it reads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
_ALIGNMENT_BYTES = 8  # to which the safetensors library pads its header


@dataclass(frozen=True)
class FileDigest:
    """Size and digest of a file, as written."""

    size_bytes: int
    sha256: str


Throttle = Callable[[Callable[[], object], int], None]  # calls its argument, which is work of so many bytes
_PIECE_BYTES = 2**20  # about a millisecond of writing and hashing


def no_throttle(work: Callable[[], object], size_bytes: int) -> None:
    """A `Throttle` without pauses."""
    work()


def write_bytes(path: Path, *parts: bytes | memoryview) -> FileDigest:
    """Create `path` from `parts`; it is on disk before this returns. Raises OSError, also if it exists."""
    with open(path, "xb") as file:
        return _write_through(file, parts, no_throttle)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], run: Throttle = no_throttle
) -> FileDigest:
    """Create a safetensors file of CPU tensors of any strides; it is on disk before this returns.

    `run` makes each piece of the work: 1 MiB written and hashed.

    Raises OSError, and StorageError for a dtype that the format does not have.
    """
    # Wide dtypes first, as in the library, so that every tensor is aligned in a mapped file.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor, start = tensors[name], offset
        offset += tensor.nbytes
        dtype, shape = _word(name, tensor.dtype), list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, offset]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    # A generator, because non-contiguous tensors are copied.
    parts = (_bytes_of(tensors[name]) for name in names)
    with open(path, "xb") as file:
        return _write_through(file, itertools.chain((len(text).to_bytes(8, "little"), text), parts), run)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file from `write_tensors`, mapped. Raises StorageError for any other file."""
    from safetensors import SafetensorError

    try:
        return mapped(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read as safetensors: {error}. Only safetensors and JSON are read. "
            "Choose another checkpoint with checkpoint.resume=PATH."
        ) from error


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped. Raises OSError, SafetensorError and ValueError."""
    from safetensors.torch import load_file

    with open(path, "rb") as file:
        # The library refuses a path with a name that is not UTF-8.
        found: dict[str, Tensor] = load_file(f"/proc/self/fd/{file.fileno()}")
    return found


def _write_through(file: BinaryIO, parts: Iterable[bytes | memoryview], run: Throttle) -> FileDigest:
    digest, size_bytes = hashlib.sha256(), 0
    for piece in _pieces(parts):
        piece_bytes = sum(len(part) for part in piece)
        run(partial(_write_piece, file, digest, piece), piece_bytes)
        size_bytes += piece_bytes
    run(partial(_to_disk, file), 0)
    return FileDigest(size_bytes, digest.hexdigest())


def _pieces(parts: Iterable[bytes | memoryview]) -> Iterator[list[bytes | memoryview]]:
    """The same bytes in pieces of about as many: short parts together, long ones divided."""
    piece, left_bytes = [], _PIECE_BYTES
    for part in parts:
        start = 0
        while start < len(part):
            piece.append(part[start : start + left_bytes])
            start += len(piece[-1])
            left_bytes -= len(piece[-1])
            if not left_bytes:
                yield piece
                piece, left_bytes = [], _PIECE_BYTES
    yield piece


def _write_piece(file: BinaryIO, digest: Any, piece: list[bytes | memoryview]) -> None:
    for part in piece:
        file.write(part)
        digest.update(part)


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
