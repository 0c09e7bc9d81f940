"""HTML elements of a report, which escape their content.

Owns markup and style. An empty input gives an empty string, so that a page omits missing parts. Uses no
scripts, links or external resources.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 0.6rem; border-bottom: 1px solid #ddd; padding-bottom: 0.2rem; }
.tiles { display: flex; flex-wrap: wrap; gap: 0.8rem; }
.tiles div { border: 1px solid #ddd; border-radius: 6px; padding: 0.5rem 0.9rem; }
.tiles dt { color: #666; font-size: 0.85rem; }
.tiles dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.9rem; text-align: right; border-bottom: 1px solid #eee; }
th { color: #666; font-weight: 500; }
table.facts th, table.facts td { text-align: left; overflow-wrap: anywhere; }
pre { background: #f6f6f6; padding: 0.8rem 1rem; border-radius: 6px; overflow-x: auto; font-size: 13px; }
img { max-width: 100%; height: auto; }
ul { padding-left: 1.2rem; margin: 0.4rem 0; }
"""


def page(title: str, body: str) -> str:
    """A whole document. `body` is markup; the title is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}\n" if body else ""


def tiles(cells: Mapping[str, str]) -> str:
    """Large numbers with their names."""
    inner = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in cells.items()
    )
    return f'<dl class="tiles">{inner}</dl>\n' if inner else ""


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """One row per mapping; the columns are all their keys, in the order of first use."""
    titles = list(dict.fromkeys(title for row in rows for title in row))
    if not titles:
        return ""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(row.get(title, ''))}</td>" for title in titles) + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>\n'


def facts(cells: Mapping[str, str]) -> str:
    """A table with a name and a text in each row."""
    inner = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>\n" for name, text in cells.items()
    )
    return f'<div class="scroll"><table class="facts">{inner}</table></div>\n' if inner else ""


def listing(texts: Iterable[str]) -> str:
    inner = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{inner}</ul>\n" if inner else ""


def preformatted(text: str) -> str:
    return f"<pre>{escape(text.rstrip())}</pre>\n" if text.strip() else ""


def picture(png: bytes, description: str) -> str:
    """An image embedded in the page."""
    if not png:
        return ""
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">\n'
