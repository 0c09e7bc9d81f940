"""The number of micro-batches per step may change between steps, with the bits of a Stepper built for it."""

from __future__ import annotations

import pytest
from torch import Tensor

from launcher.engine import SGD, Policy, Scaling, Stepper, UnusableError
from tests.engine.observe import state_digest
from tests.models import conv_net, features, loss_sum

IMAGES = features(12, seed=3, shape=(3, 8, 8))


def built_for(micro_batches: int) -> Stepper:
    return Stepper(
        conv_net(),
        SGD(0.1, momentum=0.9),
        Policy.fp16(),
        micro_batches=micro_batches,
        scaling=Scaling(init=256),
    )


def take(stepper: Stepper, micro_batches: int, data: tuple[Tensor, Tensor] = IMAGES) -> None:
    for x, classes in zip(*(part.chunk(micro_batches) for part in data), strict=True):
        with stepper.forward():
            loss = loss_sum(stepper.model(x), classes)
        stepper.backward(loss, len(x))
    assert not stepper.step().read().skipped


@pytest.mark.parametrize(("built", "wanted"), [(1, 3), (3, 1), (2, 4)])
def test_a_number_set_before_the_first_step_gives_the_bits_of_one_built_for_it(built, wanted) -> None:
    changed, expected = built_for(built), built_for(wanted)
    with changed.forward():
        changed.backward(loss_sum(changed.model(IMAGES[0]), IMAGES[1]), 12)
    changed.abandon()  # its count of 12 is no longer that of the first step
    changed.set_micro_batches(wanted)
    for stepper in (changed, expected):
        for _ in range(2):
            take(stepper, wanted)
    assert state_digest(changed, counters=True) == state_digest(expected, counters=True)
    assert changed.state().reference_count == expected.state().reference_count
    assert changed.state_bytes() == expected.state_bytes()


def test_a_number_set_in_the_middle_gives_the_bits_of_one_that_loads_the_state_there() -> None:
    changed, later = built_for(1), built_for(4)
    take(changed, 1)
    later.load(changed.state().clone())
    changed.set_micro_batches(4)
    for stepper in (changed, later):
        take(stepper, 4)
    assert state_digest(changed, counters=True) == state_digest(later, counters=True)


def test_it_is_refused_within_a_step_and_below_one() -> None:
    stepper = built_for(2)
    for number in (0, 1.5):
        with pytest.raises(UnusableError, match="micro_batches"):
            stepper.set_micro_batches(number)  # type: ignore[arg-type]
    with stepper.forward():
        loss = loss_sum(stepper.model(IMAGES[0]), IMAGES[1])
    stepper.backward(loss, 12)
    with pytest.raises(UnusableError, match="Call it between steps"):
        stepper.set_micro_batches(1)
