"""The length of a run: how many steps, and after which of them it evaluates."""

from dataclasses import replace

import pytest

from launcher.config.schema import TrainConfig
from launcher.trainer.progress import TrainLength

TRAIN = TrainConfig(
    epochs=1,
    max_steps=None,
    eval_every_epochs=1,
    eval_every_steps=None,
    log_every_steps=10,
    on_oom="halve",
    compile=False,
    activation_checkpointing=False,
    channels_last=False,
    label_smoothing=0.0,
    deterministic=False,
    tf32=False,
)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "every", "total", "evaluated"),
    [
        (3, None, 1, 30, [10, 20, 30]),
        (3, None, 2, 30, [20, 30]),
        (3, None, 5, 30, [30]),
        (3, 25, 1, 25, [10, 20, 25]),
        (3, 7, 1, 7, [7]),
        (3, 1000, 1, 30, [10, 20, 30]),
    ],
)
def test_course(epochs, max_steps, every, total, evaluated) -> None:
    length = TrainLength.of(10, replace(TRAIN, epochs=epochs, max_steps=max_steps, eval_every_epochs=every))
    assert length.total_steps == total
    assert [step for step in range(1, total + 1) if length.should_evaluate(step)] == evaluated
    assert length.next_evaluation(0) == evaluated[0]


@pytest.mark.parametrize(
    ("every_steps", "every_epochs", "evaluated"),
    [
        (4, 1000, [4, 8, 12, 16, 20, 24, 28, 30]),  # counted through the epochs, and at the end
        (5, 1, [5, 10, 15, 20, 25, 30]),  # once where both are due
        (1000, 1, [10, 20, 30]),
        (1000, 1000, [30]),
    ],
)
def test_evaluations_every_so_many_steps_come_beside_those_of_the_epochs(
    every_steps, every_epochs, evaluated
) -> None:
    train = replace(TRAIN, epochs=3, eval_every_epochs=every_epochs, eval_every_steps=every_steps)
    length = TrainLength.of(10, train)
    assert [step for step in range(1, 31) if length.should_evaluate(step)] == evaluated
    assert sorted({length.next_evaluation(step) for step in range(30)}) == evaluated
