"""Cells that stand for numbers without being such: amounts of money, percentages, dates, numbers of rows.

Owns how the cells of a column are understood, and in which words that is said. A column is understood by
its training rows; the same is then done with all rows. A cell that does not follow is left as it is, and
refused where the column is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from functools import cache, partial

import torch

from launcher.data.tables.columns import Cell, Column, is_absent, number_of
from launcher.data.tables.files import Table
from launcher.errors import ConfigError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_S = 86_400
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
NAMELESS = ("", "Unnamed: 0", "__index_level_0__")  # of the index that pandas writes

Read = Callable[[Cell], float | None]  # None for a cell that is not of the kind


def row_numbers(table: Table) -> list[str]:
    """Columns that count the rows from 0 or 1: pandas' index, whose name is none."""
    found = []
    for name in NAMELESS:
        if name in table.columns and len(numbers := table.columns[name].numbers):
            counts = torch.arange(len(numbers)) + numbers[0]
            found += [name] if numbers[0] in (0, 1) and torch.equal(numbers, counts) else []
    return found


def understood(tables: Sequence[Table], name: str, decimal: str) -> str:
    """Replace the cells of a column by numbers where its rows in the first table are such of a kind.

    Returns the kind; "" for a column that stays as it is. Raises ConfigError where data.decimal seems wrong.
    """
    column = tables[0].columns[name]
    if decimal == "." and column.is_numeric:
        return ""
    cells = column.present
    if not cells:
        return ""
    if found := _kind(cells, decimal):
        kind, read = found
        for table in tables:
            values = table.columns[name].each(lambda cell: None if is_absent(cell) else read(cell))
            pairs = zip(table.columns[name], values, strict=True)
            table.columns[name] = Column(cell if value is None else value for cell, value in pairs)
        return kind
    other = "." if decimal == "," else ","
    if _are_amounts(cells, other):
        raise ConfigError(
            f"{tables[0].file}: {name} has numbers such as {cells[0]!r:.40}, with {other!r} before the "
            f"decimals. Set data.decimal='{other}', or read it as categories: data.categorical=[{name}]."
        )
    return ""


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


def _are_amounts(cells: Column, decimal: str) -> bool:
    """Whether more than half of them are."""
    return 2 * sum(value is not None for value in cells.each(partial(amount, decimal=decimal))) > len(cells)


def _kind(cells: Column, decimal: str) -> tuple[str, Read] | None:
    """What the cells stand for, and how a cell is read; None where they are what they are."""
    if _are_amounts(cells, decimal):
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
        if isinstance(cell, str) and text is not None:
            found = datetime.strptime(cell.strip(), text)
        elif isinstance(cell, str):
            found = datetime.fromisoformat(cell.strip())
        elif isinstance(cell, date):
            found = cell if isinstance(cell, datetime) else datetime(cell.year, cell.month, cell.day)
        else:
            return None
    except ValueError:
        return None
    return ((found if found.tzinfo else found.replace(tzinfo=UTC)) - EPOCH).total_seconds() / DAY_S
