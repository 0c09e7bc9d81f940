"""Markdown that shows names as they are, whichever of two common libraries reads it."""

from __future__ import annotations

import html
import re

import markdown
import pytest
from markdown_it import MarkdownIt

from launcher.telemetry.formatting import markdown_table, markdown_text, rate

NAMES = (
    "<b>bold</b>",
    "a|b||c",
    "a*b* **c** _d_ __e__ macro_f1",
    "[a](http://b) ![p](q)",
    r"back\\slash \d \* \| C:\new",
    "`code` ~~gone~~",
    "R&D &lt; &amp;amp;",
    'optim.groups=[{match:"*.bias"}]',
)


def shown(page: str) -> list[str]:
    """The texts of the cells of the last row of a page's table."""
    row = page.rpartition("<tr>")[2].partition("</tr>")[0]
    assert not re.sub(r"</?td[^>]*>", "", row).count("<"), "no element within a cell"
    return [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_shows_the_name(name: str) -> None:
    table = "\n".join(markdown_table(["a", "b"], [[name, "1"]]))
    assert shown(MarkdownIt().enable(["table", "strikethrough"]).render(table)) == [name, "1"]
    assert shown(markdown.markdown(table, extensions=["tables"])) == [name, "1"]


def test_a_text_of_several_lines_is_one() -> None:
    assert markdown_text("one\n  # two") == "one # two"


def test_a_text_cannot_control_the_terminal_that_prints_the_table() -> None:
    assert markdown_text("optim.name=\x1b[2J") == r"optim.name=\x1b[2J"


@pytest.mark.parametrize(
    ("per_s", "shown"),
    [(5991.4, "5,991"), (99.4, "99"), (9.96, "10"), (1.56, "1.6"), (0.3, "0.3"), (0.0, "0")],
)
def test_a_rate_is_not_rounded_to_nothing(per_s: float, shown: str) -> None:
    assert rate(per_s) == shown
