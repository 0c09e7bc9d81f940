"""Which of train.epochs and train.max_steps decides how long a run is."""

from __future__ import annotations

import pytest

from launcher.trainer.builders.decisions import _length
from tests.configs import composed


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], 12 * 8),  # the epochs of the recipe
        (["train.max_steps=5000"], 5000),
        (["train.max_steps=20"], 20),
        (["train.max_steps=5000", "train.epochs=2"], 16),
        (["train.max_steps=5", "train.epochs=2"], 5),
        (["train.max_steps=null"], 12 * 8),
        (["train.epochs=null"], 10 * 8),
    ],
    ids=str,
)
def test_max_steps_rules_where_epochs_are_not_given(words, steps) -> None:
    assert composed(*words).train.total_steps(steps_per_epoch=8) == steps


def test_one_line_says_which_of_both_ends_the_run() -> None:
    assert _length(2, 5, 8) == "train.max_steps=5 ends the run: train.epochs=2 (16 steps) is not reached"
    assert _length(2, 50, 8) == "train.epochs=2 (16 steps) ends the run: train.max_steps=50 is not reached"
