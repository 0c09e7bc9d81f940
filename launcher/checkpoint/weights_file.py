"""Reads a file of weights that a user names.

Owns the refusal of what is not one: pickles, damaged files, directories. Executes nothing that it reads. The
errors leave out the name of the file, which the caller knows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from launcher.config.messages import program
from launcher.errors import ConfigError

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
PICKLE_STARTS = (b"PK\x03\x04", b"\x80")  # the zip archive of torch.save, and a bare pickle
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CONVERSION = (  # of an open file: torch.load reads a path that ends with .safetensors as safetensors
    "import torch, safetensors.torch as s; f = open({old!r}, 'rb'); "
    "s.save_file({{k: v.contiguous().clone() for k, v in "
    "torch.load(f, 'cpu', weights_only=True).items()}}, {new!r}); f.close()"
)


def sha256_of(file: Path, expected: str | None) -> str:
    """SHA-256 of a file. Raises ConfigError for a pickle, for what is no file, and for another digest."""
    try:
        if file.is_dir():
            raise ConfigError(_of_directory(file))
        if file.exists() and not file.is_file():
            raise ConfigError("it is no plain file. Give a safetensors file.")
        with open(file, "rb") as content:
            start = content.read(4)
            if file.suffix in PICKLES or start.startswith(PICKLE_STARTS):
                raise ConfigError(_of_pickle(file))
            content.seek(0)
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        raise ConfigError(f"there is no such file. Write one: {program()} export RUN FILE") from None
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}. Give a safetensors file.") from None
    if expected is not None and digest != expected:
        raise ConfigError(
            f"its SHA-256 is {digest}, but model.weights_sha256={expected}. Give the file with this "
            "digest, or leave model.weights_sha256 out."
        )
    return digest


def _of_directory(directory: Path) -> str:
    inside = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(inside) == 1:
        return f"it is a directory. Give its file: model.weights={directory / inside[0]}"
    if inside:
        return f"it is a directory with {len(inside)} safetensors files. Merge them into one."
    if (directory / "checkpoints").is_dir():
        return f"it is a run. Export its weights: {program()} export {directory} weights.safetensors"
    return "it is a directory. Give a safetensors file."


def _of_pickle(file: Path) -> str:
    line = CONVERSION.format(old=str(file), new=str(_converted(file)))
    return (
        "it is a pickle, which may run code when it is read. Only safetensors are read. To convert a "
        f'state_dict: python -c "{line}"'
    )


def _converted(file: Path) -> Path:
    """Where the conversion writes: never over the original."""
    new = file.with_suffix(".safetensors")
    return file.with_suffix(".converted.safetensors") if new == file else new


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, on the CPU. Raises ConfigError for a damaged one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"it is damaged, or no safetensors file: {error}. Copy or export it again."
        ) from error
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS and (bad := tensor.numel() - int(tensor.isfinite().sum())):
            raise ConfigError(
                f"{name} holds {bad} values that are inf or NaN. Take the weights of an earlier checkpoint."
            )
    return tensors
