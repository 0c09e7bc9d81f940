"""The cells of a column, read as numbers or as categories.

Owns what counts as absent, as a number and as the same category. Knows neither files nor other columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

Cell = Any  # text in TSV and CSV; any value of JSON or parquet, None where there is none
ABSENT = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})  # as text, in any case


def is_absent(cell: Cell) -> bool:
    """Whether a cell has no value: none at all, NaN, or text that says so."""
    if isinstance(cell, float):
        return math.isnan(cell)
    return cell is None or (isinstance(cell, str) and cell.strip().lower() in ABSENT)


def number_of(cell: Cell) -> float:
    """The cell as a number, NaN for what is none. True and False are categories."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str | Decimal):
        return math.nan
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return math.nan


def category(cell: Cell) -> str:
    """A category as text: 1, 1.0 and '1' are the same, and 1234567 and 1234568 are not."""
    number = number_of(cell)
    if math.isnan(number):
        return str(cell).strip()
    return repr(number) if number % 1 else f"{number + 0:.0f}"  # -0.0 + 0 is 0.0


class Column(list[Cell]):
    """Cells by row, and what they are read as, which is computed once. Not to be changed after that."""

    @cached_property
    def numbers(self) -> Tensor:
        """float64 [rows], NaN where a cell is absent or no number."""
        try:
            # All at once where all are numbers: a fifth of the time of a function in Python for each.
            found = map(number_of if bool in set(map(type, self)) else float, self)
            return torch.from_numpy(numpy.fromiter(found, numpy.float64, len(self)))
        except (TypeError, ValueError, OverflowError):
            return torch.tensor(self.each(number_of), dtype=torch.float64)

    @cached_property
    def absent(self) -> Tensor:
        """bool [rows]: the cells without a value."""
        nan = self.numbers.isnan()
        return nan & torch.tensor(self.each(is_absent)) if nan.any() else nan

    @cached_property
    def categories(self) -> list[str]:
        """The cells as text: 1, 1.0 and '1' are the same category."""
        return self.each(category)

    @property
    def distinct(self) -> Iterable[Cell]:
        """The cells, each text once where all are texts: True and 1 would be the same in a set."""
        return set(self) if set(map(type, self)) <= {str} else self

    def each(self, read: Callable[[Cell], Any]) -> list[Any]:
        """What `read` returns for each cell. Called once for each of the `distinct` ones."""
        distinct = self.distinct
        if distinct is self:
            return [read(cell) for cell in self]
        found = {cell: read(cell) for cell in distinct}
        return [found[cell] for cell in self]

    @property
    def present(self) -> Column:
        """The cells with a value, in order."""
        return Column(cell for cell, absent in zip(self, self.absent.tolist(), strict=True) if not absent)

    @property
    def is_numeric(self) -> bool:
        """Whether more than half of the values are numbers: then all have to be."""
        return bool(2 * (~self.numbers.isnan()).sum() > (~self.absent).sum())
