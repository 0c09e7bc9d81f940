"""What is looked at in a data set before the first step."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from launcher.data.indexed import IndexedData
from launcher.data.loader import Loading
from launcher.data.tensors import TensorData
from launcher.errors import DataError, DataWarning
from launcher.recipe import Recipe
from launcher.training.setup.data_check import (
    changes,
    digest,
    fingerprint,
    refuse_other_data,
    warn_unless_repeatable,
)


class Samples(Dataset):
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {"index": index, "noise": torch.tensor(self.draw(), dtype=torch.float64)}


class OwnGenerator:
    """As augmentations with a generator of their own draw."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self):
        return self.generator.random()


def indexed(draw):
    return IndexedData(Samples(draw), None, Loading(0, torch.device("cpu"), 0), "training")


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.int64, torch.float32, torch.bool])
def test_any_row_that_differs_is_noticed(dtype):
    column = (torch.arange(4000 * 3) % 251).reshape(4000, 3).to(dtype)
    before = digest(column)
    assert digest(column.clone()) == digest(column.T.contiguous().T) == before
    for row in (0, 1, 27, 28, 1999, 3998, 3999):
        other = column.clone()
        other[row, 2] = other[row, 2] + 1 if dtype != torch.bool else ~other[row, 2]
        assert digest(other) != before
    assert digest(column.flip(0)) != before
    assert digest(column[:0]) != before


def test_one_row_of_many_that_differs_between_ranks_is_named():
    columns = {"x": torch.randn(4000, 2), "label": torch.zeros(4000)}
    other = {**columns, "x": columns["x"].clone()}
    other["x"][1234, 1] += 1e-3
    recipe = Recipe(lambda: None, TensorData(columns), TensorData(columns), None)
    found = [fingerprint(recipe, TensorData(each), {}) for each in (columns, other, columns)]
    with pytest.raises(DataError, match=r"Rank 1 differs in: training column x, all bytes \("):
        refuse_other_data(found)


def test_each_difference_is_named_with_the_first_rank_that_has_it():
    usual, first, second = {"x": "1", "y": "1"}, {"x": "2", "y": "1"}, {"x": "1", "y": "3"}
    with pytest.raises(DataError) as error:
        refuse_other_data([usual, first, second, usual, usual])
    assert "Rank 1, 2 differs in: x (2 on rank 1, 1 elsewhere); y (3 on rank 2, 1 elsewhere)." in str(
        error.value
    )


def test_data_in_memory_is_that_of_a_checkpoint_whose_digest_had_another_form():
    data = TensorData({"x": torch.arange(3.0)})
    now = fingerprint(Recipe(lambda: None, data, data, None), data, {})
    before = {key: value for key, value in now.items() if "all bytes" not in key}
    assert not changes(
        before | {"training column x": "of 66 samples", "training column x, all rows": "1"}, now
    )
    assert "the training columns differ" in changes(before | {"the training columns": "x, y"}, now)
    assert "all bytes differ" in changes(now | {"training column x, all bytes": "another"}, now)
    stream = {"the training stream": "other data"}
    assert "the training stream differ" in changes(stream, now)


def test_small_whole_numbers_in_another_order_are_noticed():
    sets = [TensorData({"y": torch.tensor(rows)}) for rows in ([0, 1, 1, 0], [1, 0, 0, 1])]
    found = [fingerprint(Recipe(lambda: None, each, each, None), each, {}) for each in sets]
    with pytest.raises(DataError, match=r"Rank 1 differs in: training column y, all bytes \("):
        refuse_other_data(found)


def test_a_data_set_with_a_generator_of_its_own_is_warned_of():
    with pytest.warns(DataWarning, match="sample 0 of the training set differs .* seed, in noise. A resume"):
        warn_unless_repeatable(indexed(OwnGenerator()))


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(()).item(), lambda: float("nan")]
)
def test_a_data_set_that_draws_from_what_is_seeded_is_not(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unless_repeatable(indexed(draw))


def test_labels_of_permuted_classes_are_no_data_to_resume_with() -> None:
    def known(classes: tuple[str, ...], labels: str, image: str = "i") -> dict[str, str]:
        columns = {"training column label, all bytes": labels, "training column image, all bytes": image}
        return {"the classes": str(classes), "the label column": "label"} | columns

    before = known(("cat", "dog"), "0011")
    with pytest.raises(
        DataError, match=r"has the classes \('cat', 'dog'\), but now they are \('dog', 'cat'\)"
    ):
        changes(before, known(("dog", "cat"), "1100"))
    for now in (
        known(("dog", "cat"), "0011"),  # only their names were wrong
        known(("cow", "dog"), "1100"),
        known(("dog", "cat"), "1100", "another"),
    ):
        assert "is not that of the checkpoint: the classes" in changes(before, now)
