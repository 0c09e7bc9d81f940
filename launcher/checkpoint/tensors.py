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
from pathlib import Path
from typing import BinaryIO

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


Pause = Callable[[], None]  # called after each piece
PIECE_BYTES = 2**20  # about a millisecond of writing and hashing


def write_bytes(path: Path, content: bytes) -> FileDigest:
    """Create a file; it is on disk before this returns. Raises OSError, also if it exists."""
    with open(path, "xb") as file:
        return _write_through(file, [content], no_pause)


def no_pause() -> None:
    """A `Pause` for a program that waits for the file."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], pause: Pause = no_pause
) -> FileDigest:
    """Create a safetensors file of CPU tensors of any strides; it is on disk before this returns.

    `pause` is called after each MiB or two. Raises OSError, and StorageError for a dtype that the format does
    not have.
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
        return _write_through(file, itertools.chain((len(text).to_bytes(8, "little"), text), parts), pause)


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped. Raises OSError, SafetensorError and ValueError."""
    from safetensors.torch import load_file

    with open(path, "rb") as file:
        # The library refuses a path with a name that is not UTF-8.
        found: dict[str, Tensor] = load_file(f"/proc/self/fd/{file.fileno()}")
    return found


def _write_through(file: BinaryIO, parts: Iterable[bytes | memoryview], pause: Pause) -> FileDigest:
    digest, size_bytes, paused_at = hashlib.sha256(), 0, 0
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            piece = part[start : start + PIECE_BYTES]
            file.write(piece)
            digest.update(piece)
            size_bytes += len(piece)
            if size_bytes - paused_at >= PIECE_BYTES:
                pause()
                paused_at = size_bytes
    file.flush()
    os.fsync(file.fileno())
    return FileDigest(size_bytes, digest.hexdigest())


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
