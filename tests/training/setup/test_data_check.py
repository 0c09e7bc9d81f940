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
    with pytest.raises(DataError, match=r"Rank 1 differs in: training column x \("):
        refuse_other_data(found)


def test_small_whole_numbers_in_another_order_are_noticed():
    sets = [TensorData({"y": torch.tensor(rows)}) for rows in ([0, 1, 1, 0], [1, 0, 0, 1])]
    found = [fingerprint(Recipe(lambda: None, each, each, None), each, {}) for each in sets]
    with pytest.raises(DataError, match=r"Rank 1 differs in: training column y \("):
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
