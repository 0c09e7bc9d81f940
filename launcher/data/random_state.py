"""The generators that stock augmentations draw from: Python's, NumPy's and torch's, of this process.

Owns their seeding and the exchange of their states. Never touches the generators of a GPU.
"""

from __future__ import annotations

import _random
import ctypes
import hashlib
import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy
import torch
from numpy.random import mtrand
from torch import Tensor

MT19937_BYTES = 4 * (624 + 1)  # of NumPy's: words and position
WINDOW_BYTES = 32  # of a Mersenne Twister's memory: its position, and some of the words beside it
seed_torch = torch.default_generator.manual_seed  # of 32 bits; torch.manual_seed would seed every GPU too
_state_of_torch = torch.default_generator.get_state


def spread_seed(*key: int | str) -> int:
    """64 bits from a hash: generators of NumPy and torch with neighbouring seeds are alike at first."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "little")


def seed_all(seed: int) -> None:
    """Seed the three. `seed` is at least 0; NumPy and torch take 32 bits of it."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    seed_torch(seed % 2**32)


class GeneratorsKept:
    """A context at whose end the three states are those of its beginning."""

    def __enter__(self) -> None:
        self._before = states()

    def __exit__(self, *error: object) -> None:
        restore(self._before)


def sample_seeds(seed: int, epoch: int, position: int, number: int) -> list[int]:
    """64 bits for each of `number` samples from `position` of an epoch on, by SplitMix64 (Steele, 2014)."""
    positions = numpy.arange(position + 1, position + 1 + number, dtype=numpy.uint64)
    mixed = positions * numpy.uint64(0x9E3779B97F4A7C15) + numpy.uint64(spread_seed("samples", seed, epoch))
    mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return [int(each) for each in (mixed ^ (mixed >> numpy.uint64(31))).tolist()]


class States(NamedTuple):
    """The states of the three generators. `python` and `numpy` are the same objects until something draws."""

    python: Any
    numpy: Any
    torch: Tensor


def states() -> States:
    """The present ones. Takes 3 us where nothing has drawn from Python's and NumPy's since the last call."""
    return States(_python().state(), _numpy().state(), _state_of_torch())


def undrawn_since(before: States) -> bool:
    """Whether nothing has drawn since `states` returned `before`; with a spare normal number never known."""
    now = states()
    return now.python is before.python and now.numpy is before.numpy and torch.equal(now.torch, before.torch)


def restore(wanted: States) -> None:
    """Set what `states` returned."""
    _python().set(wanted.python)
    _numpy().set(wanted.numpy)
    torch.default_generator.set_state(wanted.torch)


class _Twister:
    """A global generator, whose own functions take up to 110 us to copy its state and to set it.

    Every step of a run keeps the states, which takes 3 us in this way and 115 us by the functions alone.

    They are called only where the `memory` of its position and of some of its words has changed, which is
    read and never written: a draw moves the position, and the draw that sets it back, like a seed, changes
    all words. A spare normal number is kept elsewhere. Only a draw leaves one, and while there is one the
    state is copied each time, since taking it does not change the memory.
    """

    def __init__(
        self,
        memory: Callable[[], bytes | None],
        get: Callable[[], Any],
        set_: Callable[[Any], None],
        spare: Callable[[Any], object],
        draw: Callable[[], object],
    ) -> None:
        self._memory, self._get, self._set, self._spare = memory, get, set_, spare
        self._trusted = True
        self._learn(memory(), get())
        seen = [self._known_memory]
        for _ in range(2):  # one may change all words, but not both
            draw()
            seen.append(memory())
        shows_draws = len(set(seen)) == len(seen)  # or this version keeps its position elsewhere
        set_(self._known)
        self._trusted = shows_draws and memory() == seen[0]
        self._learn(seen[0], self._known)

    def state(self) -> Any:
        memory = self._memory()
        if memory != self._known_memory or self._is_copied:
            self._learn(memory, self._get())
        return self._known

    def set(self, state: Any) -> None:
        if self._known is not state or self._is_copied or self._memory() != self._known_memory:
            self._set(state)
            self._learn(self._memory(), state)

    def _learn(self, memory: bytes | None, state: Any) -> None:
        self._known_memory, self._known = memory, state
        self._is_copied = memory is None or not self._trusted or bool(self._spare(state))


def _memory_at(address: int, size: int) -> Callable[[], bytes]:
    """Copies `size` bytes from an address, in less time than ctypes.string_at."""
    memory = (ctypes.c_char * size).from_address(address)
    return lambda: memory.raw


@cache
def _python() -> _Twister:
    size = _random.Random.__basicsize__ - object.__basicsize__
    return _Twister(
        _memory_at(id(random._inst) + object.__basicsize__, min(WINDOW_BYTES, size)),  # the position is first
        random.getstate,
        random.setstate,
        spare=lambda state: state[2] is not None,
        draw=random.random,
    )


class _NumPysMemory:
    """The window of NumPy's generator; None where a recipe has put one of another kind in its place."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._read: Callable[[], bytes | None] = lambda: None

    def __call__(self) -> bytes | None:
        generator = mtrand.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._read = generator, lambda: None
            if isinstance(generator, numpy.random.MT19937):
                end = generator.ctypes.state_address + MT19937_BYTES  # where the position is
                self._read = _memory_at(end - WINDOW_BYTES, WINDOW_BYTES)
        return self._read()


@cache
def _numpy() -> _Twister:
    return _Twister(
        _NumPysMemory(),
        numpy.random.get_state,
        numpy.random.set_state,
        spare=lambda state: state[3],
        draw=numpy.random.random_sample,
    )
