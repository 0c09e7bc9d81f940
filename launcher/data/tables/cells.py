"""Cells that stand for numbers without being such: amounts of money, percentages, dates, numbers of rows.

Owns how the cells of a column are understood, and in which words that is said. A column is understood by
its training rows; the same is then done with all rows. A cell that does not follow is left as it is, and
refused where the column is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal

from launcher.data.tables.features import is_absent, number_of
from launcher.data.tables.files import Cell, Table
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
    """Columns that count the rows: pandas' index, whose name is none."""
    found = [name for name in NAMELESS if name in table.columns]
    return [name for name in found if _counts(table.columns[name])]


def understood(tables: Sequence[Table], name: str, decimal: str) -> str:
    """Replace the cells of a column by numbers where its rows in the first table are such of a kind.

    Returns the kind; "" for a column that stays as it is. Raises ConfigError where data.decimal seems wrong.
    """
    cells = [cell for cell in tables[0].columns[name] if not is_absent(cell)]
    plain = decimal == "." and 2 * sum(number_of(cell) is not None for cell in cells) > len(cells)
    if plain or not cells:
        return ""
    for kind, read in _kinds(cells, decimal):
        for table in tables:
            values = [(cell, None if is_absent(cell) else read(cell)) for cell in table.columns[name]]
            table.columns[name][:] = [cell if value is None else value for cell, value in values]
        return kind
    other = "." if decimal == "," else ","
    if 2 * sum(amount(cell, other) is not None for cell in cells) > len(cells):
        raise ConfigError(
            f"{tables[0].file}: {name} has numbers such as {cells[0]!r:.40}, with {other!r} before the "
            f"decimals. Set data.decimal='{other}', or read it as categories: data.categorical=[{name}]."
        )
    return ""


def amount(cell: Cell, decimal: str) -> float | None:
    """1,234.5, $1.23, (12 EUR), 12 % as a number; None for other text. Thousands are groups of three."""
    if not isinstance(cell, str):
        return float(cell) if isinstance(cell, Decimal) else number_of(cell)
    group = re.escape("." if decimal == "," else ",")
    number = rf"\d{{1,3}}(?:{group}\d{{3}})+|\d+"
    pattern = (
        rf"(\()?\s*([-+])?\s*{CURRENCY}?\s*([-+])?((?:{number})?(?:{re.escape(decimal)}\d*)?)(?:[eE]([-+]?\d+))?"
        rf"\s*(?:{CURRENCY}|%)?\s*\)?"
    )
    found = re.fullmatch(pattern, cell.strip())
    if found is None or not any(character.isdigit() for character in found[4]):
        return None
    digits = found[4].replace("." if decimal == "," else ",", "").replace(decimal, ".")
    value = float(f"{digits}e{found[5] or 0}")
    return -value if found[1] or "-" in (found[2], found[3]) else value


def _kinds(cells: Sequence[Cell], decimal: str) -> list[tuple[str, Read]]:
    """The kind that fits, with how a cell is read; at most one."""
    if 2 * sum(amount(cell, decimal) is not None for cell in cells) > len(cells):
        shown = [cell for cell in cells if isinstance(cell, str)]
        money = any(re.search(CURRENCY, cell) for cell in shown)
        percent = any("%" in cell for cell in shown)
        kind = "money" if money else "percent" if percent else "numbers"
        return [(kind, lambda cell: amount(cell, decimal))]
    for text in (None, *(f"{day}{time}" for day in FORMATS for time in TIMES)):
        if all(_days(cell, text) is not None for cell in cells):
            named = "" if text is None else f", {text}"
            return [(f"dates, as days{named}", lambda cell, text=text: _days(cell, text))]  # type: ignore[misc]
    return []


def _days(cell: Cell, text: str | None) -> float | None:
    """Days since 1970 of a date in this format, ISO's where it is None."""
    try:
        if isinstance(cell, str):
            found = (
                datetime.fromisoformat(cell.strip())
                if text is None
                else datetime.strptime(cell.strip(), text)
            )
        elif isinstance(cell, date):
            found = cell if isinstance(cell, datetime) else datetime(cell.year, cell.month, cell.day)
        else:
            return None
    except ValueError:
        return None
    return ((found if found.tzinfo else found.replace(tzinfo=UTC)) - EPOCH).total_seconds() / DAY_S


def _counts(cells: Sequence[Cell]) -> bool:
    numbers = [number_of(cell) for cell in cells]
    first = numbers[0] if numbers else None
    return first in (0.0, 1.0) and numbers == [first + row for row in range(len(numbers))]
