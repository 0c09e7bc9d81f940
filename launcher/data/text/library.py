"""The `tokenizers` and `transformers` packages, loaded where they are used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from launcher.config.messages import install_line
from launcher.errors import PreflightError

THREADS = "TOKENIZERS_PARALLELISM"


def tokenizers_library() -> ModuleType:
    """The package with its submodules. Raises PreflightError where it is not installed."""
    library = _library("tokenizers")
    for part in ("models", "normalizers", "pre_tokenizers", "processors", "decoders", "trainers"):
        import_module(f"tokenizers.{part}")
    return library


def transformers_library() -> ModuleType:
    """The package. Raises PreflightError where it is not installed."""
    return _library("transformers")


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Context in which `tokenizers` starts no threads: once it has, it warns of every fork."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise PreflightError(
            f"this recipe needs the `{name}` package, which is not installed: {install_line(name)}"
        ) from error
