"""Texts of errors that several modules share. The engine, which imports itself alone, has them as well."""

from __future__ import annotations

import pytest

import launcher.engine.errors
import launcher.errors
from launcher.commands.run import report_failure
from launcher.data.reader import BadSample
from launcher.distributed.exit_records import exit_record
from launcher.errors import LauncherError, RecipeError
from launcher.user_code import short_traceback


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


class Unreadable(ValueError):
    """An exception whose text cannot be made, such as one that formats what it was not given."""

    def __str__(self) -> str:
        raise KeyError("template")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (ValueError("\x1b[2Jgone\r\x9b1m"), "ValueError: \\x1b[2Jgone\\x0d\\x9b1m"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Unreadable("{template}"), "Unreadable: (no text: its __str__ raised KeyError)"),
    ],
    ids=["lines", "escape sequences", "no text", "__str__ raises"],
)
def test_an_exception_of_any_code_is_one_line_for_people(error, text) -> None:
    assert launcher.errors.described(error) == text
    assert "\x1b" not in short_traceback(error)
    assert exit_record(1, error).error == BadSample.of(0, error).error == text


def test_a_long_text_is_cut_in_the_middle_everywhere_but_in_the_log() -> None:
    error = ValueError("begin" + "x" * 200_000 + "end")
    for text in (launcher.errors.described(error), short_traceback(error), launcher.errors.in_words(error)):
        assert "begin" in text
        assert text.rstrip().endswith("end")
        assert "characters left out" in text
        assert len(text) < 2_200
    assert len(str(RecipeError(str(error)))) < 8_100
    assert len(launcher.errors.whole_text(error)) == 200_008


def test_our_own_messages_keep_their_lines() -> None:
    text = "The batch of that step, run again:\n  rank 0: caf\udce9\t"
    assert str(LauncherError(text)) == text
    assert launcher.errors.in_words(LauncherError(text + "\x1b")) == text + "\\x1b"


def test_the_traceback_of_a_bug_of_ours_cannot_control_the_terminal(capsys) -> None:
    with pytest.raises(ValueError, match="gone") as raised:
        raise ValueError("\x1b[2Jgone")
    assert report_failure(raised.value) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):\n  File ")
    assert shown.endswith("ValueError: \\x1b[2Jgone\n")
