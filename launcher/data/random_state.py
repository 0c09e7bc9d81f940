"""The generators that stock augmentations draw from: Python's, NumPy's and torch's, of this process.

Owns their seeding and the exchange of their states. Never touches the generators of a GPU.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

seed_torch = torch.default_generator.manual_seed  # of 32 bits; torch.manual_seed would seed every GPU too


def spread_seed(*key: int | str) -> int:
    """64 bits from a hash: generators of NumPy and torch with neighbouring seeds are alike at first."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "little")


def seed_all(seed: int) -> None:
    """Seed the three. `seed` is at least 0; NumPy and torch take 32 bits of it."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    seed_torch(seed % 2**32)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the three states at the end."""
    states = _states()
    try:
        yield
    finally:
        _set(states)


def sample_seeds(seed: int, epoch: int, position: int, number: int) -> list[int]:
    """64 bits for each of `number` samples from `position` of an epoch on, by SplitMix64 (Steele, 2014)."""
    positions = numpy.arange(position + 1, position + 1 + number, dtype=numpy.uint64)
    mixed = positions * numpy.uint64(0x9E3779B97F4A7C15) + numpy.uint64(spread_seed("samples", seed, epoch))
    mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return [int(each) for each in (mixed ^ (mixed >> numpy.uint64(31))).tolist()]


@dataclass(frozen=True)
class Drawn:
    """Which generators something has drawn from."""

    torch: bool
    others: bool  # Python's or NumPy's


def drawn_since_seeded(seed: int) -> Drawn:
    """What has been drawn since `seed_all(seed)`. Takes about 0.1 ms."""
    with generators_kept():
        now = _states()
        seed_all(seed)
        fresh = _states()
    same = now[0] == fresh[0] and all(map(numpy.array_equal, now[1], fresh[1]))
    return Drawn(torch=not torch.equal(now[2], fresh[2]), others=not same)


class Untouched:
    """Tells which generators something has drawn from. Seeds Python's and NumPy's for that.

    Seeding the three before each sample would take longer than reading a small one.
    """

    _MARK = 0x6C61756E

    def __init__(self) -> None:
        with generators_kept():
            self.begin()
            self._first = self._draw()

    def begin(self) -> None:
        random.seed(self._MARK)
        numpy.random.seed(self._MARK)
        self._of_torch = torch.default_generator.get_state()

    def drawn(self) -> Drawn:
        """Since `begin`. Draws itself."""
        of_torch = torch.default_generator.get_state()
        return Drawn(torch=not torch.equal(of_torch, self._of_torch), others=self._draw() != self._first)

    @staticmethod
    def _draw() -> tuple[float, float]:
        return random.random(), float(numpy.random.random_sample())


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
