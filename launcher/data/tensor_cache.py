"""Results that take long to compute from a data set, such as its tokens, kept as tensors in a mapped file.

Owns the files: one for each key, written whole or not at all, by one process of a machine while the others
wait. What is not of the key that is asked for is never read. Never a reason to end a run: where no file can
be written, the tensors are made in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 2  # of what is stored; another number and nothing that is older is read
PROGRESS_S = 10.0  # between two lines of a process that waits

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

    The key holds everything that decides the content, as JSON values. Tensors of a file are mapped: the
    processes of a machine share their memory.
    """
    if folder is None:
        return make()
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"
    if (found := _read(path, text)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(path):
            return _read(path, text) or _written(path, text, make())
    except OSError as error:
        log.warning("nothing is kept in %s: %s. data.cache=DIR names another folder.", folder, error)
        return make()


def _read(path: Path, key: str) -> Stored | None:
    try:
        # The library refuses a path with a name that is not UTF-8.
        with open(path, "rb") as opened, safe_open(f"/proc/self/fd/{opened.fileno()}", "pt") as file:
            texts = dict(file.metadata() or {})
            if texts.pop("key", None) != key:
                return None
            return Stored({name: file.get_tensor(name) for name in file.keys()}, texts)  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        log.warning("%s cannot be read and is made again: %s", path, error)
        return None


def _written(path: Path, key: str, made: Stored) -> Stored:
    """Write, then read: so that this process maps the file as all others do. In memory where it cannot."""
    partial = path.with_suffix(".partial")  # of this key alone, whose lock this process holds
    try:
        save_file(made.tensors, partial, {**made.texts, "key": key})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        log.warning("%s cannot be written: %s. data.cache=DIR names another folder.", path, error)
        return made
    return _read(path, key) or made


@contextlib.contextmanager
def locked(made: Path) -> Iterator[None]:
    """Context in which this process alone may write the file `made`."""
    lock = FileLock(made.with_suffix(".lock"), timeout=PROGRESS_S)
    began = time.monotonic()
    while not lock.is_locked:
        try:
            lock.acquire()
        except Timeout:
            waited = time.monotonic() - began
            log.info("waiting for another process, which writes %s: %.0f s", made, waited)
    try:
        yield
        if made.exists():  # who locks another file of this name finds what was made before it writes
            made.with_suffix(".lock").unlink(missing_ok=True)
    finally:
        lock.release()
