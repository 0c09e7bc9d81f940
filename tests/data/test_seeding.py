"""What a micro-batch draws depends on what it is, and on nothing that was drawn before."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from launcher.data.seeding import derive_seed, seed_all, seed_compute, seed_evaluation, seed_reading

CPU = torch.device("cpu")
DRAWS = {
    "Python": random.random,
    "Python, normal": lambda: random.gauss(0, 1),
    "NumPy": numpy.random.rand,
    "NumPy, normal": lambda: numpy.random.normal(),
    "torch": lambda: torch.rand(()).item(),
    "torch, normal": lambda: torch.randn(()).item(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("before", [0, 1], ids=["none is spare", "a normal number is spare"])
def test_a_seed_says_all_that_follows(draw, before) -> None:
    """Also where a generator of the earlier numbers has kept the second normal number of a pair."""
    seed_all(1)
    expected = [draw() for _ in range(3)]
    seed_all(2)
    for _ in range(before):
        draw()
    seed_all(1)
    assert [draw() for _ in range(3)] == expected
    assert len(set(expected)) == 3


KEYS = {
    "reading": [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, -1, 0)],
    "compute": [
        (0, 1, 0, 0, CPU),
        (1, 1, 0, 0, CPU),
        (0, 2, 0, 0, CPU),
        (0, 1, 1, 0, CPU),
        (0, 1, 0, 1, CPU),
    ],
    "evaluation": [(0, 0, 0, CPU), (1, 0, 0, CPU), (0, 1, 0, CPU), (0, 0, 1, CPU)],
}
FUNCTIONS = {"reading": seed_reading, "compute": seed_compute, "evaluation": seed_evaluation}


def test_each_micro_batch_of_each_rank_draws_others() -> None:
    found = []
    for name, keys in KEYS.items():
        for key in keys:
            FUNCTIONS[name](*key)  # type: ignore[operator]
            found += [draw() for draw in DRAWS.values()]
    assert len(set(found)) == len(found) == len(DRAWS) * sum(map(len, KEYS.values()))


def test_seeds_are_the_same_in_every_process_and_version() -> None:
    """Saved runs depend on them: a resumed run would draw others."""
    assert derive_seed(0, 1, 2, "data") == 16449777808674577977
    assert derive_seed("12", 3) != derive_seed("1", 23)
