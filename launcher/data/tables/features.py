"""Tables of numbers and categories as tensors: which column is what, and how its cells become numbers.

Owns the standardisation and the codes of categories, both fitted to the training rows alone. Never reads a
file and never splits: `launcher.data.tables.tabular_set` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.data.tables.files import DataTable
from launcher.errors import DataError, listed

UNKNOWN = 0  # the code of a category that the training rows lack, and of an absent one


def numbers(table: DataTable, name: str) -> Tensor:
    """The values of a column of numbers: float64 [rows], NaN where one is absent.

    Raises DataError for text and infinity.
    """
    column = table.column(name)
    wrong = ~(column.numbers.isfinite() | column.absent)
    if wrong.any():
        row = int(wrong.int().argmax())
        raise DataError(
            f"{table.place(row)}: {name} is {column[row]!r:.60}, and the column has numbers. Correct the "
            f"cell, or read the column as categories: data.categorical=[{name}]."
        )
    return column.numbers


def is_numeric(table: DataTable, name: str) -> bool:
    """Whether a column has numbers. Raises DataError for one without a value."""
    if table.column(name).absent.all():
        raise DataError(
            f"{table.file}: the column {name} has no value in any of its {len(table)} rows. Leave it out."
        )
    return table.column(name).is_numeric


@dataclass(frozen=True)
class Numeric:
    """A column of numbers, as fp32 with mean 0 and standard deviation 1 over the training rows."""

    name: str
    mean: float
    std: float  # 1 where all training values are equal

    @classmethod
    def fit(cls, table: DataTable, name: str) -> Numeric:
        values = numbers(table, name)
        present = values[~values.isnan()]
        std = float(present.std(correction=0))
        return cls(name, float(present.mean()), std if std > 0 else 1.0)

    def tensor(self, table: DataTable) -> Tensor:
        """fp32 [rows]; the mean, 0, where a value is absent."""
        return ((numbers(table, self.name) - self.mean) / self.std).nan_to_num(nan=0.0).float()


@dataclass(frozen=True)
class Categorical:
    """A column of categories, as whole numbers: UNKNOWN, then those of the training rows in order."""

    name: str
    categories: tuple[str, ...]

    @classmethod
    def fit(cls, table: DataTable, name: str) -> Categorical:
        return cls(name, tuple(sorted(present_categories(table, name))))

    def num_unseen(self, table: DataTable) -> int:
        """Rows with a category that is none of the training rows'."""
        return int(((self.tensor(table) == UNKNOWN) & ~table.column(self.name).absent).sum())

    @property
    def size(self) -> int:
        """How many codes there are."""
        return 1 + len(self.categories)

    def tensor(self, table: DataTable) -> Tensor:
        """int64 [rows]."""
        codes = {each: code for code, each in enumerate(self.categories, start=UNKNOWN + 1)}
        column = table.column(self.name)
        found = torch.tensor([codes.get(each, UNKNOWN) for each in column.categories])
        return found.masked_fill(column.absent, UNKNOWN)


@dataclass(frozen=True)
class Features:
    """The columns that a model reads, fitted to the training rows."""

    numeric: tuple[Numeric, ...]
    categorical: tuple[Categorical, ...]

    @classmethod
    def fit(cls, table: DataTable, names: Sequence[str], categorical: Sequence[str]) -> Features:
        """Fit the columns `names`. Raises DataError where none of them has two values in the training set."""
        kinds = {name: name not in categorical and is_numeric(table, name) for name in names}
        fitted = cls(
            tuple(Numeric.fit(table, name) for name in names if kinds[name]),
            tuple(Categorical.fit(table, name) for name in names if not kinds[name]),
        )
        if not any(len(present_categories(table, name)) > 1 for name in names):
            raise DataError(
                f"{table.file}: each column to learn from ({listed(list(names), 8) or 'none'}) has one value "
                "in all training rows: nothing can be learned from them."
            )
        return fitted

    def columns(self, table: DataTable) -> dict[str, Tensor]:
        """`numeric` fp32 [rows, columns] and `categorical` int64 [rows, columns], those that there are."""
        found = {}
        if self.numeric:
            found["numeric"] = torch.stack([column.tensor(table) for column in self.numeric], dim=1)
        if self.categorical:
            found["categorical"] = torch.stack([column.tensor(table) for column in self.categorical], dim=1)
        return found


def present_categories(table: DataTable, name: str) -> set[str]:
    """The different values of a column as text."""
    column = table.column(name)
    return {text for text, out in zip(column.categories, column.absent.tolist(), strict=True) if not out}


def absent_in(table: DataTable, names: Sequence[str]) -> dict[str, int]:
    """How many values are absent, by column; only columns that lack some."""
    counts = {name: int(table.column(name).absent.sum()) for name in names}
    return {name: count for name, count in counts.items() if count}


def refuse_absent(table: DataTable, counts: dict[str, int], advice: str) -> None:
    """Raise DataError for values that are absent: `counts` by column."""
    row = int(table.column(next(iter(counts))).absent.int().argmax())
    listing = listed([f"{name} ({count})" for name, count in counts.items()], 8)
    raise DataError(
        f"{sum(counts.values())} values are absent or NaN in {table.file}: {listing}. The first is in "
        f"{table.place(row)}. {advice}"
    )
