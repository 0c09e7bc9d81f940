"""The generators that stock augmentations draw from: Python's, NumPy's and torch's, of this process.

Owns their seeding and the exchange of their states. Never touches the generators of a GPU.
"""

from __future__ import annotations

import _random
import ctypes
import hashlib
import random
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy
import torch
from numpy.random import mtrand
from torch import Tensor

MT19937_BYTES = 4 * (624 + 1)  # of NumPy's: words and position
# random.seed takes 0.5 us more, for seeds of other types, and forgets the spare normal number too.
_seed_python = partial(_random.Random.seed, random._inst)
seed_torch = torch.default_generator.manual_seed  # of 32 bits; torch.manual_seed would seed every GPU too
_state_of_torch = torch.default_generator.get_state


def spread_seed(*key: int | str) -> int:
    """64 bits from a hash: generators of NumPy and torch with neighbouring seeds are alike at first."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "little")


def seed_all(seed: int) -> None:
    """Seed the three. `seed` is at least 0; NumPy and torch take 32 bits of it.

    Takes 9 us: 4.3 for Python's, 2.7 for NumPy's and 1.4 for torch's, in which each makes the 624 words of a
    Mersenne Twister. To make these words for a whole batch by NumPy and to copy them there takes no less.
    """
    _seed_python(seed)
    random._inst.gauss_next = None  # type: ignore[attr-defined]
    low = seed & 0xFFFFFFFF
    numpy.random.seed(low)
    seed_torch(low)


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

    python: object
    numpy: object
    torch: Tensor

    def undrawn(self) -> bool:
        """Whether nothing has drawn since `states` returned these."""
        now = states()
        return now.python is self.python and now.numpy is self.numpy and torch.equal(now.torch, self.torch)


def states() -> States:
    """The present ones. Takes 3 us where nothing has drawn from Python's and NumPy's since the last call."""
    return States(_python().state(), _numpy().state(), _state_of_torch())


def restore(wanted: States) -> None:
    """Set what `states` returned."""
    _python().set(wanted.python)
    _numpy().set(wanted.numpy)
    torch.default_generator.set_state(wanted.torch)


class _Twister:
    """A global generator, whose own functions take up to 125 us to copy its state and to set it.

    Every step of a run keeps the states, which takes 3 us in this way and 115 us by the functions alone.

    They are called only where its `memory` has changed: words, position and the spare normal number, which is
    kept elsewhere, and without which two states may have the same words. `normal` draws a normal number.
    """

    def __init__(
        self,
        memory: Callable[[], object],
        get: Callable[[], Any],
        set_: Callable[[Any], None],
        normal: Callable[[], object],
    ) -> None:
        self._memory, self._get, self._set = memory, get, set_
        self._trusted = True
        self._learn(memory(), get())
        # One of two normal numbers draws, the other is the spare one: does this version keep both there?
        found = [memory(), normal() and memory(), normal() and memory()]
        self._trusted = found[0] != found[1] != found[2]
        set_(self._known)
        self._learn(memory(), self._known)

    def state(self) -> object:
        memory = self._memory()
        if memory != self._known_memory or not self._trusted:
            self._learn(memory, self._get())
        return self._known

    def set(self, state: object) -> None:
        if self._known is not state or not self._trusted or self._memory() != self._known_memory:
            self._set(state)
            self._learn(self._memory(), state)

    def _learn(self, memory: object, state: Any) -> None:
        self._known_memory, self._known = memory, state


@cache
def _python() -> _Twister:
    words = _content_of(random._inst, _random.Random)
    return _Twister(
        lambda: (words.raw, random._inst.gauss_next),  # type: ignore[attr-defined]
        random.getstate,
        random.setstate,
        lambda: random.gauss(0, 1),
    )


@cache
def _numpy() -> _Twister:
    rest = _content_of(mtrand._rand, mtrand.RandomState)  # the spare number is in it

    def memory() -> object:
        generator = mtrand.get_bit_generator()
        words = _memory_of(generator)
        state = repr(numpy.random.get_state(legacy=False)) if words is None else (words.raw, rest.raw)
        return generator, state

    return _Twister(memory, _state_of_numpys, _set_numpys, numpy.random.standard_normal)


def _content_of(instance: object, kind: type) -> ctypes.Array[ctypes.c_char]:
    """The memory of an object without its header, as far as its class written in C, `kind`, defines it."""
    size = kind.__basicsize__ - object.__basicsize__
    return (ctypes.c_char * size).from_address(id(instance) + object.__basicsize__)


@lru_cache(1)
def _memory_of(generator: object) -> ctypes.Array[ctypes.c_char] | None:
    """The words and the position of NumPy's generator; None of one of another kind, set by a recipe."""
    if not isinstance(generator, numpy.random.MT19937):
        return None
    return (ctypes.c_char * MT19937_BYTES).from_address(generator.ctypes.state_address)


def _state_of_numpys() -> tuple[object, Any]:
    """NumPy's generator, which a recipe may replace by one of another kind, and its state."""
    generator = mtrand.get_bit_generator()
    is_usual = _memory_of(generator) is not None
    return generator, numpy.random.get_state() if is_usual else numpy.random.get_state(legacy=False)


def _set_numpys(wanted: tuple[Any, Any]) -> None:
    """Set a state, in 3 us of 125 that NumPy's own function takes where it has no spare normal number."""
    generator, state = wanted
    if mtrand.get_bit_generator() is not generator:
        mtrand.set_bit_generator(generator)
    memory = _memory_of(generator)
    if memory is None or state[3]:  # of another kind, or with a spare number
        numpy.random.set_state(state)
        return
    _, words, position, *_ = state
    memory.raw = words.tobytes() + position.to_bytes(4, sys.byteorder)
    mtrand.set_bit_generator(generator)  # forgets a spare normal number
