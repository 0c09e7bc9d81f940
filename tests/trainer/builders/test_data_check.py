"""What is looked at in a data set before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from launcher.data.loader import LoaderConfig
from launcher.data.sources import wrap_dataset
from launcher.data.tensors import TensorData
from launcher.errors import DataError
from launcher.recipe import Recipe
from launcher.trainer.builders.data_check import (
    check_equal_on_ranks,
    check_same_data_as_checkpoint,
    data_fingerprint,
    digest,
)


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
    found = [data_fingerprint(recipe, TensorData(each), {}) for each in (columns, other, columns)]
    with pytest.raises(DataError, match=r"Rank 1 differs in: training column x \("):
        check_equal_on_ranks(found)


def test_each_difference_is_named_with_the_first_rank_that_has_it():
    usual, first, second = {"x": "1", "y": "1"}, {"x": "2", "y": "1"}, {"x": "1", "y": "3"}
    with pytest.raises(DataError) as error:
        check_equal_on_ranks([usual, first, second, usual, usual])
    assert "Rank 1, 2 differs in: x (2 on rank 1, 1 elsewhere); y (3 on rank 2, 1 elsewhere)." in str(
        error.value
    )


def test_small_whole_numbers_in_another_order_are_noticed():
    sets = [TensorData({"y": torch.tensor(rows)}) for rows in ([0, 1, 1, 0], [1, 0, 0, 1])]
    found = [data_fingerprint(Recipe(lambda: None, each, each, None), each, {}) for each in sets]
    with pytest.raises(DataError, match=r"Rank 1 differs in: training column y \("):
        check_equal_on_ranks(found)


@pytest.mark.parametrize("make", [lambda data: data, lambda data: Rows(data), lambda data: Stream(data)])
@pytest.mark.parametrize("column", ["image", "label"])
def test_float_columns_in_another_order_are_noticed_between_ranks(make, column):
    """Features or multi-hot labels numbered by a set(), which each process orders in its own way."""
    values = {"image": FEATURES, "label": (FEATURES > 0).float()}
    other = values | {column: values[column][:, ORDER]}
    with pytest.raises(DataError, match=rf"Rank 1 differs in: training .*column {column} "):
        check_equal_on_ranks([known(make(TensorData(each))) for each in (values, other)])


def test_last_bits_and_constant_columns_are_no_difference_between_ranks():
    standardised = (FEATURES - FEATURES.mean(1, keepdim=True)) / FEATURES.std(1, keepdim=True)
    rows = {"x": FEATURES, "constant": torch.full((12, 6), 0.1), "standardised": standardised}
    near = {name: values * (1 + 1e-7) + 1e-8 for name, values in rows.items()}
    check_equal_on_ranks([known(Rows(TensorData(each))) for each in (rows, near)])


def known(data: Any, **changed: Any) -> dict[str, str]:
    """What a checkpoint keeps of a training set."""
    how = LoaderConfig(0, torch.device("cpu"), 0)
    recipe = replace(Recipe(lambda: None, data, data, None, classes=("cat", "dog")), **changed)
    return data_fingerprint(recipe, wrap_dataset(data, None, how, "training"), {})


IMAGES, LABELS = torch.arange(48).reshape(12, 4) / 7, torch.arange(12) % 2


def columns(**changed: Any) -> TensorData:
    return TensorData({"image": IMAGES, "label": LABELS, **changed})


class Rows(Dataset):
    """The same as a map-style set, with what those of torchvision and transformers have."""

    def __init__(self, data: TensorData, **attributes: Any) -> None:
        self.data = data
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.data.columns.items()}


class Stream(IterableDataset):
    def __init__(self, data: TensorData) -> None:
        self.data = data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Rows(self.data)[index] for index in range(12))


FEATURES = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
ORDER = [3, 1, 0, 5, 2, 4]


MEANING: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "the order of the classes": (
        known(columns()),
        known(columns(), classes=("dog", "cat")),
        "the classes (('cat', 'dog') there, ('dog', 'cat') now)",
    ),
    "labels in memory": (known(columns()), known(columns(label=1 - LABELS)), "training column label ("),
    "labels of few bits": (
        known(columns(label=LABELS.to(torch.uint8))),
        known(columns(label=(1 - LABELS).to(torch.uint8))),
        "training column label (",
    ),
    "labels of samples": (
        known(Rows(columns())),
        known(Rows(columns(label=1 - LABELS))),
        "training sample 0 column label (",
    ),
    "labels of a stream": (
        known(Stream(columns())),
        known(Stream(columns(label=1 - LABELS))),
        "training samples 0 to 3 column label (",
    ),
    "classes by number": (
        known(Rows(columns(), class_to_idx={"cat": 0, "dog": 1})),
        known(Rows(columns(), class_to_idx={"cat": 1, "dog": 0})),
        "the classes of the training set (",
    ),
    "tokens": (
        known(TensorData({"tokens": LABELS})),
        known(TensorData({"tokens": 1 - LABELS})),
        "training column tokens (",
    ),
    "a column more": (known(columns()), known(columns(more=LABELS)), "the training columns ("),
    "the shape": (known(columns()), known(columns(image=IMAGES[:, :2])), "training column image ("),
    "the normalisation": (
        known(columns(), eval_transform=SimpleNamespace(normalisation={"mean": [0.5], "std": [0.25]})),
        known(columns(), eval_transform=SimpleNamespace(normalisation={"mean": [0.4], "std": [0.25]})),
        "the normalisation (",
    ),
}


@pytest.mark.parametrize(("before", "now", "named"), MEANING.values(), ids=MEANING)
def test_what_gives_the_weights_their_meaning_must_be_that_of_the_checkpoint(before, now, named) -> None:
    assert check_same_data_as_checkpoint(before, before, allowed=False) == ""
    with pytest.raises(DataError, match=r"checkpoint\.allow_other_data=true") as error:
        check_same_data_as_checkpoint(before, now, allowed=False)
    assert f"another meaning: {named}" in str(error.value)
    assert "the data is not that of the checkpoint" in check_same_data_as_checkpoint(
        before, now, allowed=True
    )


@pytest.mark.parametrize(
    "now",
    [
        known(columns(image=IMAGES + 1e-6)),
        known(columns(image=IMAGES.flip(0))),
        known(columns()) | {"validation column label": "torch.int64 [12]: digest 1"},
    ],
    ids=["rounded otherwise", "in another order", "evaluated on other samples"],
)
def test_other_inputs_are_a_warning(now) -> None:
    before = known(columns()) | {"validation column label": "torch.int64 [12]: digest 0"}
    assert "the data is not that of the checkpoint" in check_same_data_as_checkpoint(
        before, now, allowed=False
    )


def test_other_metrics_and_a_checkpoint_without_a_fingerprint_are_no_difference() -> None:
    before = known(columns(), monitor="loss", metrics=[])
    assert check_same_data_as_checkpoint(before, known(columns()), allowed=False) == ""
    assert check_same_data_as_checkpoint({}, known(columns()), allowed=False) == ""


def test_attributes_of_other_kinds_are_not_taken_for_classes() -> None:
    odd = Rows(columns(), features=IMAGES, class_to_idx="cat")
    assert known(odd) == known(Rows(columns()))
