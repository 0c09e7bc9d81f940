"""The golden file of messages has entries of tests that exist, and no others."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.golden import FILE, ROOT, Message, as_text, entries, known


@cache
def source(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def test_every_entry_belongs_to_a_test() -> None:
    places = {tuple(re.split(r"::|\[", name)[:2]) for name in known()}
    assert {place for place in places if f"def {place[1]}(" not in source(place[0])} == set()


def test_the_file_is_as_it_would_be_written() -> None:
    assert FILE.read_text(encoding="utf-8") == as_text(known())


def test_a_text_of_several_lines_is_read_as_it_was_written() -> None:
    messages = {"a": "one\n\n  two", "b[=== c]": "three"}
    assert entries(as_text(messages)) == messages


def test_another_text_than_that_of_the_file_is_refused(message: Message, tmp_path: Path) -> None:
    assert (
        message(ValueError(f"{tmp_path}: the second is compared too."))
        == f"{tmp_path}: the second is compared too."
    )
    with pytest.raises(AssertionError, match="differs from"):
        message("a sentence that the file has not")
