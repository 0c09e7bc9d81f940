"""HTML elements of a report, which escape their content.

Owns markup. An empty input gives an empty string, so that a page omits missing parts. A page loads nothing:
its policy allows its own style and its own script only.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from launcher.report.reading import MAX_TEXT

GENERATOR = "fp16-launcher report"  # by which a page of ours is known
STATES = ("done", "failed")
ASSETS = Path(__file__).parent
MAX_WORD = 500  # characters of an override: a list of classes may have thousands


def page(title: str, subtitle: str, body: str) -> str:
    """A whole document. `body` is markup; the titles are text."""
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="generator" content="{GENERATOR}">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>\n{paragraph(subtitle, 'sub')}{body}</main>\n"
        f"<script>{script}</script></body></html>\n"
    )


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>\n" if body else ""


def subsection(title: str, body: str) -> str:
    return f"<h3>{escape(title)}</h3>\n{body}" if body and title else body


def folded(title: str, body: str) -> str:
    """A part that is closed at first."""
    return f'<details class="part"><summary>{escape(title)}</summary>\n{body}</details>\n' if body else ""


def grid(charts: Iterable[str]) -> str:
    """Charts side by side where there is room."""
    inner = "".join(charts)
    return f'<div class="charts">{inner}</div>\n' if inner else ""


def cells(parts: Iterable[str]) -> str:
    """Parts of several runs side by side where there is room."""
    return grid(f'<div class="cell">{part}</div>' for part in parts if part)


def paragraph(text: str, kind: str = "") -> str:
    shown = f' class="{kind}"' if kind else ""
    return f"<p{shown}>{escape(text)}</p>\n" if text else ""


def failure(title: str, text: str) -> str:
    return f'<div class="failure"><b>{escape(title)}</b>\n{escape(text)}</div>\n' if text else ""


def words(title: str, texts: Iterable[str]) -> str:
    """Words as they are typed, after a title."""
    inner = " ".join(f"<code>{escape(text[:MAX_WORD])}</code>" for text in texts)
    return f'<p class="words">{escape(title)} {inner}</p>\n' if inner else ""


def tiles(cells: Mapping[str, str]) -> str:
    """Large numbers with their names."""
    inner = "".join(
        f"<div><dt>{escape(name)}</dt><dd{_state(text)}>{escape(text)}</dd></div>"
        for name, text in cells.items()
    )
    return f'<dl class="tiles">{inner}</dl>\n' if inner else ""


def scrolled(name: str, body: str, kind: str = "scroll") -> str:
    """A part that may be wider than the page: keys scroll it, and a screen reader says what it is."""
    return f'<div class="{kind}" tabindex="0" role="group" aria-label="{escape(name)}">{body}</div>\n'


def hidden(text: str) -> str:
    """Text for screen readers only."""
    return f'<span class="hidden">{escape(text)}</span>'


def table(name: str, rows: Sequence[Mapping[str, str]], texts: Collection[str] = ()) -> str:
    """One row per mapping; the columns are all their keys, in the order of first use.

    The columns in `texts` hold sentences rather than numbers. A screen reader says the name.
    """
    titles = list(dict.fromkeys(title for row in rows for title in row))
    if not titles:
        return ""
    kinds = {title: ' class="text"' if title in texts else "" for title in titles}
    head = "".join(f'<th scope="col"{kinds[title]}>{escape(title)}</th>' for title in titles)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kinds[title] or _state(row.get(title, ''))}>{escape(row.get(title, ''))}</td>"
            for title in titles
        )
        + "</tr>\n"
        for row in rows
    )
    return scrolled(name, f"<table><caption>{hidden(name)}</caption><tr>{head}</tr>\n{body}</table>")


def listing(texts: Iterable[str]) -> str:
    inner = "".join(f"<li>{escape(text[:MAX_TEXT])}</li>" for text in texts)
    return f'<ul class="plain">{inner}</ul>\n' if inner else ""


def preformatted(name: str, text: str) -> str:
    return scrolled(name, f"<pre>{escape(text.rstrip())}</pre>") if text.strip() else ""


def _state(text: str) -> str:
    return f' class="{text}"' if text in STATES else ""
