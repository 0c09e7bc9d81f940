"""The generators that stock augmentations draw from: Python's, NumPy's and torch's, of this process.

Owns their seeding and the exchange of their states. Never touches the generators of a GPU.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def spread_seed(*key: int | str) -> int:
    """64 bits from a hash: generators of NumPy and torch with neighbouring seeds are alike at first."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "little")


def seed_all(seed: int) -> None:
    """Seed the three. `seed` is at least 0; NumPy and torch take 32 bits of it."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**32)  # torch.manual_seed would seed every GPU too


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the three states at the end."""
    states = _states()
    try:
        yield
    finally:
        _set(states)


class Generators:
    """Three states apart from those of the process, which has them within the context."""

    def __init__(self, seed: int) -> None:
        with generators_kept():
            seed_all(seed)
            self._states = _states()

    def __enter__(self) -> None:
        self._outside = _states()
        _set(self._states)

    def __exit__(self, *error: object) -> None:
        self._states = _states()
        _set(self._outside)


def _states() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()


def _set(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
