"""Texts of errors that several modules share. The engine, which imports itself alone, has them as well."""

from __future__ import annotations

import pytest

import launcher.engine.errors
import launcher.errors


@pytest.mark.parametrize("listed", [launcher.errors.listed, launcher.engine.errors.listed])
@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a", "b"], "a, b"),
        ([7, 8, 9], "7, 8 and 1 more"),
        (range(1202), "0, 1 and 1,200 more"),
    ],
)
def test_a_long_list_is_cut_and_says_by_how_many(listed, names, text) -> None:
    assert listed(names, 2) == text
    assert listed(names, 2, "; ") == text.replace(", ", "; ", 1)
