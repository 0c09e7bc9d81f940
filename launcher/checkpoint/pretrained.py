"""Reads a file of weights that a user names.

Owns the refusal of what is not one: pickles, damaged files, directories. Executes nothing that it reads. The
errors leave out the name of the file, which the caller knows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint.tensors import mapped
from launcher.config.messages import command_name
from launcher.errors import ConfigError

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
PICKLE_STARTS = (b"PK\x03\x04", b"\x80")  # the zip archive of torch.save, and a bare pickle
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Of an open file: torch.load reads a path that ends with .safetensors as safetensors. Training scripts save
# the state_dict within a dictionary, beside numbers and other dictionaries.
CONVERSION = (
    "import torch, safetensors.torch as s; f = open({old!r}, 'rb'); "
    "d = torch.load(f, 'cpu', weights_only=True); "
    "d = next((d[k] for k in ('state_dict', 'model_state_dict', 'model', 'module', 'net') "
    "if isinstance(d.get(k), dict)), d); s.save_file({{k: v.contiguous().clone() for k, v in d.items() "
    "if isinstance(v, torch.Tensor)}}, {new!r}); f.close()"
)


def sha256_of(file: Path, expected: str | None) -> str:
    """SHA-256 of a file. Raises ConfigError for a pickle, for what is no file, and for another digest."""
    try:
        with open(file, "rb") as content:
            start = content.read(9)
            # The length of a safetensors header, before its "{", may begin with the byte of a pickle too.
            if start[8:] != b"{" and (file.suffix in PICKLES or start.startswith(PICKLE_STARTS)):
                raise ConfigError(_of_pickle(file))
            content.seek(0)
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        advice = f"Give a safetensors file; of a run `{command_name()} export RUN FILE` writes one"
        raise ConfigError(f"{file.name} cannot be read: {error.strerror}. {advice}.") from None
    if expected is not None and digest != expected:
        raise ConfigError(
            f"its SHA-256 is {digest}, but model.init_from_sha256={expected}. Give the file with this "
            "digest, or leave model.init_from_sha256 out."
        )
    return digest


def _of_pickle(file: Path) -> str:
    # It never writes over the original.
    ending = ".converted.safetensors" if file.suffix == ".safetensors" else ".safetensors"
    line = CONVERSION.format(old=str(file), new=str(file.with_suffix(ending)))
    return (
        "it is a pickle, which may run code when it is read. Only safetensors are read. To convert a "
        f'state_dict: python -c "{line}"'
    )


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, on the CPU. Raises ConfigError for a damaged one."""
    from safetensors import SafetensorError

    try:
        return mapped(file)
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"it is damaged, or not one safetensors file: {error}. Copy or export it again; put together the "
            "files that an index names."
        ) from error
