import random

import numpy
import pytest
import torch
from numpy.random import PCG64, SFC64, Philox, mtrand

from launcher.data.random_state import GeneratorsKept, _numpy, _python, restore, seed_all, states

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
def test_what_has_drawn_is_found_and_undone(draw, before):
    """A second normal number comes from where the first left it, and leaves the other numbers untouched."""
    seed_all(1)
    for _ in range(before):
        draw()
    at_start = states()
    assert at_start.undrawn()
    with GeneratorsKept():
        first = draw()
        assert not at_start.undrawn()
        seed_all(2)
    assert draw() == first
    restore(at_start)
    assert draw() == first


@pytest.mark.parametrize("draws", [1, 2, 623, 624, 625, 1248], ids=str)
@pytest.mark.parametrize(
    "draw", [lambda: random.getrandbits(32), lambda: numpy.random.bytes(4)], ids=["Python", "NumPy"]
)
def test_any_number_of_draws_is_found(draw, draws):
    """Also as many as there are words, after which the position is the same again."""
    for _ in range(3):
        at_start = states()
        for _ in range(draws):
            draw()
        assert not at_start.undrawn()


@pytest.mark.parametrize(
    ("seed", "draw", "normal"),
    [
        (random.seed, random.random, lambda: random.gauss(0, 1)),
        (numpy.random.seed, numpy.random.random_sample, numpy.random.standard_normal),
    ],
    ids=["Python", "NumPy"],
)
def test_a_spare_number_is_found_where_the_words_are_the_same(seed, draw, normal):
    """From 3 both functions take two numbers, and the normal one leaves a spare number besides."""

    def drawn():
        seed(3)
        draw(), draw()

    drawn()
    without = states()
    seed(3)
    normal()
    assert not without.undrawn()
    with_spare = states()
    drawn()
    assert not with_spare.undrawn()
    following = draw()
    restore(with_spare)
    spare = normal()
    assert draw() == following, "the spare number was taken, and no other"
    restore(without)
    assert normal() != spare


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["Python", "NumPy"])
def test_another_seed_is_found_also_at_the_same_position(draw):
    seed_all(1)
    at_start = states()
    random.seed(2) if draw is random.random else numpy.random.seed(2)
    assert not at_start.undrawn()


def test_the_generators_of_this_version_are_watched_rather_than_copied():
    assert _python()._trusted
    assert _numpy()._trusted


def test_the_states_are_not_copied_again_until_something_draws():
    seed_all(1)
    first, second = states(), states()
    assert first.python is second.python
    assert first.numpy is second.numpy
    random.random(), numpy.random.rand()
    third = states()
    assert third.python is not first.python
    assert third.numpy is not first.numpy


@pytest.fixture
def usual():
    generator = mtrand.get_bit_generator()
    yield generator
    mtrand.set_bit_generator(generator)


@pytest.mark.parametrize("kind", [PCG64, Philox, SFC64], ids=lambda kind: kind.__name__)
def test_a_bit_generator_of_another_kind_is_watched_like_the_usual_one(usual, kind):
    mtrand.set_bit_generator(kind(1))
    at_start = states()
    assert at_start.undrawn()
    with GeneratorsKept():
        first = numpy.random.rand()
        assert not at_start.undrawn()
    assert at_start.undrawn()
    assert numpy.random.rand() == first
    restore(at_start)
    numpy.random.standard_normal(), numpy.random.rand()
    restore(at_start)
    assert numpy.random.rand() == first


@pytest.mark.parametrize("back", [False, True], ids=["to another kind", "to the usual one"])
def test_a_bit_generator_that_was_replaced_is_put_back(usual, back):
    before, other = (PCG64(1), usual) if back else (usual, PCG64(1))
    mtrand.set_bit_generator(before)
    at_start = states()
    with GeneratorsKept():
        first = numpy.random.rand()
        mtrand.set_bit_generator(other)
        assert not at_start.undrawn()
        numpy.random.rand()
    assert mtrand.get_bit_generator() is before
    assert numpy.random.rand() == first
