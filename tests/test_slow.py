"""The list of slow tests names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import SLOW


def test_every_listed_test_is_there() -> None:
    root = SLOW.parents[1]
    texts: dict[str, str] = {}
    for line in SLOW.read_text().splitlines():
        path, *_, name = re.split(r"\[| 1/", line)[0].split("::")
        text = texts.setdefault(path, Path(root, path).read_text())
        assert f"def {name}(" in text, line
