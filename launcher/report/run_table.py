"""The runs as a table for a terminal: one line for each, and why it failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.process.terminal import wrapped
from launcher.report.overview import row_of
from launcher.report.run_record import RunRecord

LEFT = ("run", "state", "bound by")
LAST_TO_GO = ("run", "state", "steps", "loss")
MAX_NAME, MIN_NAME = 48, 12


def run_table(runs: Sequence[RunRecord], columns: int | None) -> str:
    """Columns that do not fit are dropped from the right; what is not a terminal (None) gets all of them."""
    longest = MAX_NAME if columns is None else min(MAX_NAME, max(MIN_NAME, columns // 3))
    rows = [{**row_of(run), "run": shortened(run.name, longest)} for run in runs]
    titles = list(dict.fromkeys(title for row in rows for title in row))
    widths = {title: max(len(title), *(len(row.get(title, "-")) for row in rows)) for title in titles}
    droppable = [title for title in reversed(titles) if title not in LAST_TO_GO] + ["loss", "steps"]
    while columns is not None and droppable and sum(widths.values()) + 2 * (len(widths) - 1) > columns:
        widths.pop(droppable.pop(0), None)
    lines = [_line({title: title for title in widths}, widths)]
    for run, row in zip(runs, rows, strict=True):
        lines.append(_line(row, widths))
        if text := run.error or run.note:
            lines.append(wrapped(f"  {first_line(text)}", columns))
    return "\n".join(lines)


def shortened(name: str, longest: int) -> str:
    """The end of the name, where runs differ, without control characters."""
    name = printable(name)
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def first_line(text: str) -> str:
    """The first line, without control characters."""
    return printable(text.strip().partition("\n")[0])


def printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _line(row: Mapping[str, str], widths: Mapping[str, int]) -> str:
    cells = (
        row.get(title, "-").ljust(width) if title in LEFT else row.get(title, "-").rjust(width)
        for title, width in widths.items()
    )
    return printable("  ".join(cells).rstrip())
