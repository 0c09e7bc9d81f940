"""Texts in Markdown tables, and rates."""

from __future__ import annotations

import pytest

from launcher.telemetry.formatting import markdown_table, markdown_text, rate


def test_a_text_of_several_lines_is_one_and_ends_no_cell() -> None:
    assert markdown_text("one\n  # two") == "one # two"
    assert markdown_table(["a"], [["b|c"]])[2] == r"| b\|c |"


def test_a_text_cannot_control_the_terminal_that_prints_the_table() -> None:
    assert markdown_text("optim.name=\x1b[2J") == r"optim.name=\x1b[2J"


@pytest.mark.parametrize(
    ("per_s", "shown"),
    [(5991.4, "5,991"), (99.4, "99"), (9.96, "10"), (1.56, "1.6"), (0.3, "0.3"), (0.0, "0")],
)
def test_a_rate_is_not_rounded_to_nothing(per_s: float, shown: str) -> None:
    assert rate(per_s) == shown
