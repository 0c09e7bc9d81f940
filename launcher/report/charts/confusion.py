"""Mistakes by class: the confusion matrix as a table of colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from launcher.report.html import paragraph, scrolled
from launcher.report.run import Run

MAX_CLASSES = 26  # of a table with names and counts: the letters of the alphabet fit
CAPTION = "rows: true class; columns: predicted"
STRONG = 0.55  # share from which on the text is bold


def confusion_part(run: Run) -> str:
    """The markup; "" where no classes were counted, or where the result holds no square of counts."""
    counts, given = run.result.confusion_matrix, run.result.classes
    if not counts or any(len(row) != len(counts) or min(row) < 0 for row in counts):
        return ""
    names = list(given if given and len(given) == len(counts) else map(str, range(len(counts))))
    of_set = f" in {run.history.sets[0]}" if run.history.sets else ""
    right, total = sum(row[k] for k, row in enumerate(counts)), sum(map(sum, counts))
    text = paragraph(f"{right:,} of {total:,} right{of_set}.")
    return text + (_matrix(names, counts) if len(counts) <= MAX_CLASSES else "")


def _matrix(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """A table of counts, each on a colour for its share of its true class."""
    rows = [f"<tr><td></td>{''.join(_head(name, 'col') for name in names)}</tr>"]
    for row, (name, of_class) in enumerate(zip(names, counts, strict=True)):
        total = max(1, sum(of_class))
        cells = (_cell(count, count / total, row == column) for column, count in enumerate(of_class))
        rows.append(f"<tr>{_head(name, 'row')}{''.join(cells)}</tr>")
    body = "\n".join([f'<caption class="note">{CAPTION}</caption>', *rows])
    return scrolled("Confusion matrix", f'<table class="confusion">{body}</table>')


def _head(name: str, scope: str) -> str:
    """The page's style cuts what is too long; the title has all."""
    return f'<th scope="{scope}" title="{escape(name)}">{escape(name)}</th>'


def _cell(count: int, share: float, is_right: bool) -> str:
    """The root of the share is drawn, so that rare mistakes still show."""
    if not share:
        return "<td></td>"
    kinds = [*(["wrong"] if not is_right else []), *(["strong"] if share >= STRONG else [])]
    shown = f' class="{" ".join(kinds)}"' if kinds else ""
    return f'<td{shown} style="--share:{100 * share**0.5:.0f}">{count:,}</td>'
