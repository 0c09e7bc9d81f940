"""The full texts of messages, in one file: a changed sentence is one reviewed diff of tests/messages.golden.

A test asserts what a message must name (the key, the rule) and passes it through the fixture `message`, which
compares the text with the entry of that test. `pytest --write-messages` writes the entries of the tests run.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("messages.golden")
ROOT = Path(__file__).parents[1]
WRITE = "--write-messages"
LONGEST = 200
Message = Callable[[object], str]


def entries(text: str) -> dict[str, str]:
    """Each message by its name: the id of its test, and a number from the second one of a test on."""
    parts = re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)[1:]
    return {name: body.rstrip("\n") for name, body in zip(parts[::2], parts[1::2], strict=True)}


def as_text(messages: dict[str, str]) -> str:
    return "\n".join(f"=== {name}\n{messages[name]}\n" for name in sorted(messages))


def shortened(name: str) -> str:
    """An id that is not too long for a line: some tests have files of 10 MB in theirs."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}... {digest}"


@cache
def known() -> dict[str, str]:
    return entries(FILE.read_text(encoding="utf-8"))


def write(name: str, text: str) -> None:
    """Replace one entry. Processes of pytest-xdist write the file in turn."""
    with FILE.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        messages = entries(file.read()) | {name: text}
        file.truncate(0)
        file.write(as_text(messages))


@pytest.fixture
def message(request: pytest.FixtureRequest, tmp_path: Path) -> Message:
    """`message(error)` is the text of the error, once it equals the entry of this test."""
    given: list[str] = []

    def checked(error: object) -> str:
        given.append(str(error))
        text = "\n".join(line.rstrip() for line in str(error).splitlines())
        for place, name in ((tmp_path, "TMP"), (ROOT, "CLONE")):  # which differ between machines and runs
            text = text.replace(str(place), name)
        number = f" #{len(given)}" if len(given) > 1 else ""
        name = shortened(ascii(request.node.nodeid)[1:-1]) + number
        if request.config.getoption(WRITE):
            write(name, text)
        else:
            assert text == known().get(name), f"differs from {FILE.name}: if it is better, use {WRITE}"
        return str(error)

    return checked
