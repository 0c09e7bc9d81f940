"""The random numbers of a run, by seeding and never by saving states.

Owns the one rule for seeds, and the generators that they are set in: Python's, NumPy's and torch's of this
process, and that of its GPU. They are seeded before each micro-batch is read, transformed and computed, from
what the micro-batch is and not from what was drawn before. So a restart, a resume and another number of
loader processes draw the same, and what an evaluation or a trial draws changes nothing.
"""

from __future__ import annotations

import hashlib
import random

import numpy
import torch

EVALUATION = -1  # the epoch of samples that are evaluated: their random numbers are always the same


def derive_seed(*key: int | str) -> int:
    """64 bits from a hash: generators of NumPy and torch with neighbouring seeds are alike at first."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "little")


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators, and that of `device` if it is a GPU.

    `seed` is at least 0; NumPy and torch take 32 bits of it. Takes 9 us, and `derive_seed` 1.5 (minimum of
    200 blocks): each of the three makes the 624 words of a Mersenne Twister.
    """
    low = seed & 0xFFFFFFFF
    random.seed(seed)
    numpy.random.seed(low)
    torch.default_generator.manual_seed(low)  # torch.manual_seed would seed the generators of all GPUs
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(low)


def seed_reading(seed: int, epoch: int, position: int) -> None:
    """Seed the generators before a micro-batch is read; `position` is its first in the epoch's order.

    The position says which step, rank and micro-batch it is.
    """
    seed_all(derive_seed(seed, epoch, position, "data"))


def seed_transform(seed: int, epoch: int, position: int, device: torch.device) -> None:
    """Seed the generators before a micro-batch is transformed: another process may have read it."""
    seed_all(derive_seed(seed, epoch, position, "transform"), device)


def seed_compute(seed: int, step: int, rank: int, micro_batch: int, device: torch.device) -> None:
    """Seed the generators before the forward pass of a rank's micro-batch number `micro_batch` of a step."""
    seed_all(derive_seed(seed, step, rank, micro_batch, "compute"), device)


def seed_evaluation(seed: int, rank: int, batch: int, device: torch.device) -> None:
    """Seed the generators before a batch is evaluated: alike in each evaluation of a run."""
    seed_all(derive_seed(seed, rank, batch, "evaluation"), device)
