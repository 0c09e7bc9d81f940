"""The cells of a column, read as numbers or as categories.

Owns what counts as absent, as a number and as the same category, and which cells stand for numbers without
being such: amounts of money, percentages, dates. Knows neither files nor other columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache, cached_property, partial
from typing import Any

import numpy
import torch
from torch import Tensor

Cell = Any  # text in TSV and CSV; any value of JSON or parquet, None where there is none
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_S = 86_400
EXACT = 2**53  # up to which a float is any whole number
CURRENCY = r"(?:[$€£¥₹]|USD|EUR|GBP|CHF|JPY)"
FORMATS = (  # of dates, besides ISO's; the first that all training rows have
    "%d.%m.%Y",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%Y/%m/%d",
    "%m/%d/%y",
    "%d-%m-%Y",
    "%b %d, %Y",
    "%B %d, %Y",
    "%d %b %Y",
    "%d %B %Y",
)
TIMES = ("", " %H:%M", " %H:%M:%S")
Read = Callable[[Cell], float | None]  # None for a cell that is not of the kind
ABSENT = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})  # as text, in any case


def is_absent(cell: Cell) -> bool:
    """Whether a cell has no value: none at all, NaN, or text that says so."""
    if isinstance(cell, float):
        return math.isnan(cell)
    return cell is None or (isinstance(cell, str) and cell.strip().lower() in ABSENT)


def number_of(cell: Cell) -> float:
    """The cell as a number, NaN for what is none: True and False are categories, and so is 2019_01."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str | Decimal):
        return math.nan
    if isinstance(cell, str) and "_" in cell:  # which float() leaves out
        return math.nan
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return math.nan


def category(cell: Cell) -> str:
    """A category as text: 1, 1.0 and '1' are the same, two whole numbers of any length are not."""
    number = number_of(cell)
    if math.isnan(number):
        return str(cell).strip()
    if number % 1:
        return repr(number)
    if abs(number) >= EXACT:
        return str(int(Decimal(str(cell))))
    return f"{number + 0:.0f}"  # -0.0 + 0 is 0.0


class Column(list[Cell]):
    """Cells by row, and what they are read as, which is computed once. Not to be changed after that."""

    @cached_property
    def numbers(self) -> Tensor:
        """float64 [rows], NaN where a cell is absent or no number."""
        if self._are_as_float_reads_them:
            # All at once where all are numbers: a fifth of the time of a function in Python for each.
            with suppress(TypeError, ValueError, OverflowError):
                return torch.from_numpy(numpy.fromiter(map(float, self), numpy.float64, len(self)))
        return torch.tensor(self.each(number_of), dtype=torch.float64)

    @property
    def _are_as_float_reads_them(self) -> bool:
        """Whether float() finds no number in a cell where `number_of` finds none."""
        try:
            return "_" not in "".join(self)  # a third of the time of a search in each
        except TypeError:  # not all are texts
            return not {bool, str} & set(map(type, self))

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

    def each(self, read: Callable[[Cell], object]) -> list[Any]:
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


def amount(cell: Cell, decimal: str) -> float | None:
    """1,234.5, $1.23, (12 EUR), 12 % as a number; None for other text. Thousands are groups of three."""
    if not isinstance(cell, str):
        return None if math.isnan(number := number_of(cell)) else number
    found = _amounts(decimal).fullmatch(cell.strip())
    if found is None or not any(character.isdigit() for character in found[4]):
        return None
    digits = found[4].replace("." if decimal == "," else ",", "").replace(decimal, ".")
    value = float(f"{digits}e{found[5] or 0}")
    return -value if found[1] or "-" in (found[2], found[3]) else value


@cache
def _amounts(decimal: str) -> re.Pattern[str]:
    group = re.escape("." if decimal == "," else ",")
    number = rf"\d{{1,3}}(?:{group}\d{{3}})+|\d+"
    return re.compile(
        rf"(\()?\s*([-+])?\s*{CURRENCY}?\s*([-+])?((?:{number})?(?:{re.escape(decimal)}\d*)?)(?:[eE]([-+]?\d+))?"
        rf"\s*(?:{CURRENCY}|%)?\s*\)?"
    )


def are_amounts(cells: Column, decimal: str) -> bool:
    """Whether more than half of them are."""
    return 2 * sum(value is not None for value in cells.each(partial(amount, decimal=decimal))) > len(cells)


def kind_of(cells: Column, decimal: str) -> tuple[str, Read] | None:
    """What the cells stand for, and how a cell is read; None where they are what they are."""
    if are_amounts(cells, decimal):
        shown = [cell for cell in cells.distinct if isinstance(cell, str)]
        money = any(re.search(CURRENCY, cell) for cell in shown)
        percent = any("%" in cell for cell in shown)
        kind = "money" if money else "percent" if percent else "numbers"
        return kind, partial(amount, decimal=decimal)
    for text in (None, *(f"{day}{time}" for day in FORMATS for time in TIMES)):
        if all(_days(cell, text) is not None for cell in cells.distinct):
            return f"dates, as days{f', {text}' if text else ''}", partial(_days, text=text)
    return None


def _days(cell: Cell, text: str | None) -> float | None:
    """Days since 1970 of a date in this format, ISO's where it is None."""
    try:
        if isinstance(cell, str):
            word = cell.strip()
            found = datetime.fromisoformat(word) if text is None else datetime.strptime(word, text)
        elif isinstance(cell, date):
            found = cell if isinstance(cell, datetime) else datetime(cell.year, cell.month, cell.day)
        else:
            return None
    except ValueError:
        return None
    return ((found if found.tzinfo else found.replace(tzinfo=UTC)) - EPOCH).total_seconds() / DAY_S
