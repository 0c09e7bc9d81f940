"""Markdown that shows names as they are, whichever of two common libraries reads it."""

from __future__ import annotations

import html
import re

import markdown
import pytest
from markdown_it import MarkdownIt

from launcher.telemetry.formatting import markdown_table, markdown_text

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
