"""Writes the figures that the project promises, as measured last, into the READMEs.

    python -m scripts.bench.tables

A table stands between `<!-- figures -->` and `<!-- end of figures -->`. A test compares it with the results.
"""

from __future__ import annotations

import json
from pathlib import Path

from scripts.bench.all_benchmarks import RESULTS, figures_in
from scripts.bench.interleaved import HEAD, cells

ROOT = Path(__file__).resolve().parents[2]
READMES = (ROOT / "scripts" / "README.md",)
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->"


def markdown_table() -> str:
    """The promised figures of all results, with how many times and when they were measured."""
    lines = [(*HEAD, "n, date"), ("---",) * (len(HEAD) + 1)]
    for result in json.loads(RESULTS.read_text()).values():
        when = f"{result['n']}, {result['machine']['date']}"
        lines += [(*cells(each), when) for each in figures_in(result) if each.promised is not None]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_tables(text: str) -> str:
    """The text with its table as the results have it."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + markdown_table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    for readme in READMES:
        readme.write_text(with_tables(readme.read_text()))
