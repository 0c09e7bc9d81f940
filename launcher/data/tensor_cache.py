"""Results that take long to compute from a data set, such as its tokens, kept as tensors in a mapped file.

Owns the files: one for each key, written whole or not at all, by one process of a machine while the others
wait. Never a reason to end a run: where no file can be written, the tensors are made in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 3  # of what is stored; another number and nothing that is older is read

log = logging.getLogger("launcher")


@dataclass(frozen=True)
class Stored:
    """Named tensors, on the CPU, and named texts."""

    tensors: dict[str, Tensor]
    texts: dict[str, str]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors whose names begin with "name/", by the rest of their names."""
        start = f"{name}/"
        return {key.removeprefix(start): each for key, each in self.tensors.items() if key.startswith(start)}


def cache_folder(option: str) -> Path | None:
    """The folder that data.cache=none|auto|DIR asks for; None: nothing is kept."""
    if option == "auto":
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp16-launcher"
    return None if option == "none" else Path(os.path.expanduser(option))


def size_and_time(file: Path) -> tuple[int, int]:
    """What a key holds of a file beside its name: its bytes and the time of its last change."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def cached(folder: Path | None, key: Mapping[str, object], make: Callable[[], Stored]) -> Stored:
    """What `make` returns, from the file of this key where there is one; else made and written.

    The key holds everything that decides the content, as JSON values; the file's name is its digest. Tensors
    of a file are mapped: the processes of a machine share their memory.
    """
    if folder is None:
        return make()
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"
    if (found := _read(path)) is not None:  # without the lock: the folder may be read-only
        return found
    made = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if (found := _read(path)) is not None:
                return found
            made = make()
            _write(path, made)
            return _read(path) or made  # mapped, as in all other processes
    except OSError as error:
        log.warning("nothing is kept in %s: %s. data.cache=DIR names another folder.", folder, error)
        return made or make()


def _read(path: Path) -> Stored | None:
    try:
        # The library refuses a path with a name that is not UTF-8.
        with open(path, "rb") as opened, safe_open(f"/proc/self/fd/{opened.fileno()}", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Stored(tensors, dict(file.metadata() or {}))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, SafetensorError) as error:
        log.warning("%s cannot be read and is made again: %s", path, error)
        return None


def _write(path: Path, made: Stored) -> None:
    """Write the whole file or none. Raises OSError."""
    partial = path.with_suffix(".partial")  # of this key alone, whose lock this process holds
    try:
        save_file(made.tensors, partial, made.texts)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except SafetensorError as error:  # such as a full disk
        raise OSError(str(error)) from error
    finally:
        partial.unlink(missing_ok=True)
