"""Pages are true: tables as the programs that wrote them would write them today, tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import scale
from scripts.bench import tables


def test_the_readmes_have_the_promised_figures_as_they_were_measured() -> None:
    for readme in tables.READMES:
        text = readme.read_text()
        assert text == tables.with_tables(text), "run: python -m scripts.bench.tables"


def test_the_page_on_scale_has_the_tables_that_are_computed() -> None:
    found = re.findall(r"(?:^\|.*\n)+", scale.PAGE.read_text(), flags=re.M)
    assert found == scale.tables(scale.MODELS), "run: scripts/run python scripts/scale.py --write"


def test_the_tests_of_the_guarantees_exist() -> None:
    tests = Path(__file__).parent
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (tests / "README.md").read_text())
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (tests / file).read_text(), f"{file}::{name}"
