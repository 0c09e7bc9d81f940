"""The generators that stock augmentations draw from: Python's, NumPy's and torch's, of this process.

Owns their seeding and the exchange of their states. Never touches the generators of a GPU.
"""

from __future__ import annotations

import _random
import ctypes
import hashlib
import random
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy
import torch
from numpy.random import mtrand
from torch import Tensor

Memory = ctypes.Array[ctypes.c_char]
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
    """The states of the three generators."""

    python: tuple[bytes, float | None]  # words and position; the spare normal number
    numpy: tuple[Any, ...]  # the generator and its state
    torch: Tensor


def states() -> States:
    """The present ones, in 3 us where `random.getstate` and `numpy.random.get_state` take some 60.

    Every step of a run keeps them: those of Python and NumPy are therefore read from memory.
    """
    python = _memory_of_python().raw, random._inst.gauss_next  # type: ignore[attr-defined]
    return States(python, _state_of_numpy(), _state_of_torch())


def undrawn_since(before: States) -> bool:
    """Whether nothing has drawn since `states` returned `before`."""
    now = states()
    return (now.python, now.numpy) == (before.python, before.numpy) and torch.equal(now.torch, before.torch)


def restore(wanted: States) -> None:
    """Set what `states` returned."""
    _memory_of_python().raw, random._inst.gauss_next = wanted.python  # type: ignore[attr-defined]
    generator, state, *of_legacy = wanted.numpy
    if mtrand.get_bit_generator() is not generator:
        mtrand.set_bit_generator(generator)
    if of_legacy:
        _words_of(generator).raw, _memory_of_numpy().raw = state, *of_legacy
    else:
        numpy.random.set_state(state)
    torch.default_generator.set_state(wanted.torch)


def _state_of_numpy() -> tuple[Any, ...]:
    """The generator behind numpy.random, its words, and the memory that has the spare normal number.

    That memory has pointers into the generator too, which do not change as long as it is the same.
    """
    generator = mtrand.get_bit_generator()
    if isinstance(generator, numpy.random.MT19937):
        return generator, _words_of(generator).raw, _memory_of_numpy().raw
    return generator, numpy.random.get_state(legacy=False)  # of a recipe's choice


@cache
def _memory_of_python() -> Memory:
    return _content_of(random._inst, _random.Random)


@cache
def _memory_of_numpy() -> Memory:
    return _content_of(mtrand._rand, mtrand.RandomState)


def _content_of(instance: object, kind: type) -> Memory:
    """The memory of an object without its header, as far as its class written in C, `kind`, defines it."""
    size = kind.__basicsize__ - object.__basicsize__
    return (ctypes.c_char * size).from_address(id(instance) + object.__basicsize__)


@lru_cache(1)
def _words_of(generator: numpy.random.MT19937) -> Memory:
    return (ctypes.c_char * MT19937_BYTES).from_address(generator.ctypes.state_address)
