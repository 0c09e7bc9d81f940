"""Tables of numbers and categories as tensors: which column is what, and how its cells become numbers.

Owns the reading of cells, the standardisation and the codes of categories, both fitted to the training rows
alone. Never reads a file and never splits: `launcher.data.tables.tabular_set` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.data.tables.files import Cell, Table
from launcher.errors import DataError, listed

ABSENT = frozenset(
    {"", "na", "n/a", "nan", "null", "none", "?"}
)  # text of a cell without a value, in any case
UNKNOWN = 0  # the code of a category that the training rows lack, and of an absent one
REFUSE, IMPUTE = "refuse", "impute"


def is_absent(cell: Cell) -> bool:
    """Whether a cell has no value: none at all, NaN, or text that says so."""
    if isinstance(cell, float):
        return math.isnan(cell)
    return cell is None or (isinstance(cell, str) and cell.strip().lower() in ABSENT)


def number_of(cell: Cell) -> float | None:
    """The cell as a number, None for what is none. True and False are categories."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        return None
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return None


def numbers(table: Table, name: str) -> list[float]:
    """The values of a column of numbers, NaN where one is absent. Raises DataError for text and infinity."""
    found = []
    for row, cell in enumerate(table.column(name)):
        value = math.nan if is_absent(cell) else number_of(cell)
        if value is None or math.isinf(value):
            raise DataError(
                f"{table.place(row)}: {name} is {cell!r:.60}, and the column has numbers. Correct the cell, "
                f"or read the column as categories: data.categorical=[{name}]."
            )
        found.append(value)
    return found


def is_numeric(table: Table, name: str) -> bool:
    """Whether more than half of the values of a column are numbers: then all have to be."""
    values = [cell for cell in table.column(name) if not is_absent(cell)]
    if not values:
        raise DataError(
            f"{table.file}: the column {name} has no value in any of its {len(table)} rows. Leave it out."
        )
    return 2 * sum(number_of(cell) is not None for cell in values) > len(values)


def category(cell: Cell) -> str:
    """A category as text: 1, 1.0 and '1' are the same."""
    value = number_of(cell)
    return f"{value:g}" if value is not None else str(cell).strip()


@dataclass(frozen=True)
class Numeric:
    """A column of numbers, as fp32 with mean 0 and standard deviation 1 over the training rows."""

    name: str
    mean: float
    std: float  # 1 where all training values are equal

    @classmethod
    def fit(cls, table: Table, name: str) -> Numeric:
        values = torch.tensor(numbers(table, name), dtype=torch.float64)
        present = values[~values.isnan()]
        std = float(present.std(correction=0))
        return cls(name, float(present.mean()), std if std > 0 else 1.0)

    def tensor(self, table: Table) -> Tensor:
        """fp32 [rows]; the mean, 0, where a value is absent."""
        values = torch.tensor(numbers(table, self.name), dtype=torch.float64)
        return ((values - self.mean) / self.std).nan_to_num(nan=0.0).float()


@dataclass(frozen=True)
class Categorical:
    """A column of categories, as whole numbers: UNKNOWN, then those of the training rows in order."""

    name: str
    categories: tuple[str, ...]

    @classmethod
    def fit(cls, table: Table, name: str) -> Categorical:
        return cls(name, tuple(sorted({category(c) for c in table.column(name) if not is_absent(c)})))

    def num_unseen(self, table: Table) -> int:
        """Rows with a category that is none of the training rows'."""
        known = set(self.categories)
        return sum(not is_absent(c) and category(c) not in known for c in table.column(self.name))

    @property
    def size(self) -> int:
        """How many codes there are."""
        return 1 + len(self.categories)

    def tensor(self, table: Table) -> Tensor:
        """int64 [rows]."""
        codes = {each: code for code, each in enumerate(self.categories, start=UNKNOWN + 1)}
        cells = table.column(self.name)
        return torch.tensor([UNKNOWN if is_absent(c) else codes.get(category(c), UNKNOWN) for c in cells])


@dataclass(frozen=True)
class Features:
    """The columns that a model reads, fitted to the training rows."""

    numeric: tuple[Numeric, ...]
    categorical: tuple[Categorical, ...]

    @classmethod
    def fit(cls, table: Table, names: Sequence[str], categorical: Sequence[str]) -> Features:
        """Of the columns `names`. Raises DataError where none of them has two values in the training rows."""
        kinds = {name: name not in categorical and is_numeric(table, name) for name in names}
        fitted = cls(
            tuple(Numeric.fit(table, name) for name in names if kinds[name]),
            tuple(Categorical.fit(table, name) for name in names if not kinds[name]),
        )
        if not any(len({category(c) for c in table.column(n) if not is_absent(c)}) > 1 for n in names):
            raise DataError(
                f"{table.file}: each column to learn from ({listed(list(names), 8) or 'none'}) has one value "
                "in all training rows: nothing can be learned from them."
            )
        return fitted

    def columns(self, table: Table) -> dict[str, Tensor]:
        """`numeric` fp32 [rows, columns] and `categorical` int64 [rows, columns], those that there are."""
        found = {}
        if self.numeric:
            found["numeric"] = torch.stack([column.tensor(table) for column in self.numeric], dim=1)
        if self.categorical:
            found["categorical"] = torch.stack([column.tensor(table) for column in self.categorical], dim=1)
        return found


def absent_in(table: Table, names: Sequence[str]) -> dict[str, int]:
    """How many values are absent, by column; only columns that lack some."""
    counts = {name: sum(map(is_absent, table.column(name))) for name in names}
    return {name: count for name, count in counts.items() if count}


def refuse_absent(table: Table, counts: dict[str, int]) -> None:
    """Raise DataError for values that are absent: `counts` by column."""
    first = next(name for name in counts)
    row = next(row for row, cell in enumerate(table.column(first)) if is_absent(cell))
    listing = listed([f"{name} ({count})" for name, count in counts.items()], 8)
    raise DataError(
        f"{sum(counts.values())} values are absent or NaN in {table.file}: {listing}. The first is in "
        f"{table.place(row)}. Complete them, or set data.missing={IMPUTE}: the mean of the training rows for "
        "numbers, a category of their own for the others."
    )
