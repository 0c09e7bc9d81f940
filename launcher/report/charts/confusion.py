"""Mistakes by class: the confusion matrix as a table of colours, and of many classes the most frequent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from launcher.report.curve import FloatArray
from launcher.report.html import paragraph, scrolled, table
from launcher.report.run import Run
from launcher.telemetry.formatting import middle_cut, number, percent

MAX_COUNTED = 26  # classes of a table with names and counts: the letters of the alphabet fit
MAX_MISTAKES = 25  # rows of the table of mistakes
MAX_NAME = 60  # characters in a table
CAPTION = "rows: true class; columns: predicted"
STRONG = 0.55  # share from which on the text is bold


@dataclass(frozen=True)
class ConfusionChart:
    """How many samples of each true class were predicted as each class."""

    counts: Sequence[Sequence[int]]
    names: list[str]
    of_set: str = ""

    @classmethod
    def of(cls, run: Run) -> ConfusionChart | None:
        """None where no classes were counted, or where the result holds no square of counts."""
        counts, given = run.result.confusion_matrix, run.result.classes
        if not counts or any(len(row) != len(counts) or min(row) < 0 for row in counts):
            return None
        names = given if given and len(given) == len(counts) else map(str, range(len(counts)))
        return cls(counts, list(names), run.history.sets[0] if run.history.sets else "")

    @property
    def shares(self) -> FloatArray:
        """Each cell's share of its true class."""
        counts = np.array(self.counts, np.float64)
        shares: FloatArray = counts / np.maximum(counts.sum(axis=1)[:, None], 1)
        return shares

    @property
    def text(self) -> str:
        right, total = sum(row[k] for k, row in enumerate(self.counts)), sum(map(sum, self.counts))
        return f"{right:,} of {total:,} right{f' in {self.of_set}' if self.of_set else ''}."


def confusion_part(run: Run) -> str:
    """The markup; "" where no classes were counted."""
    found = ConfusionChart.of(run)
    if found is None:
        return ""
    if len(found.counts) <= MAX_COUNTED:
        return paragraph(found.text) + _matrix(found)
    mistakes = table("Most frequent mistakes", _mistakes(found), texts=("true class", "predicted"))
    return paragraph(found.text) + mistakes


def _matrix(found: ConfusionChart) -> str:
    """A table of counts, each on a colour for its share."""
    shares = found.shares
    rows = [f"<tr><td></td>{''.join(_head(name, 'col') for name in found.names)}</tr>"]
    for row, (name, counts) in enumerate(zip(found.names, found.counts, strict=True)):
        cells = (_cell(count, shares[row, column], row == column) for column, count in enumerate(counts))
        rows.append(f"<tr>{_head(name, 'row')}{''.join(cells)}</tr>")
    body = "\n".join([f'<caption class="note">{CAPTION}</caption>', *rows])
    return scrolled("Confusion matrix", f'<table class="confusion">{body}</table>')


def _head(name: str, scope: str) -> str:
    shown = escape(middle_cut(name, MAX_NAME))
    return f'<th scope="{scope}" title="{escape(name)}">{shown}</th>'


def _cell(count: int, share: float, is_right: bool) -> str:
    """The root of the share is drawn, so that rare mistakes still show."""
    if not share:
        return "<td></td>"
    kinds = [*(["wrong"] if not is_right else []), *(["strong"] if share >= STRONG else [])]
    shown = f' class="{" ".join(kinds)}"' if kinds else ""
    return f'<td{shown} style="--share:{100 * share**0.5:.0f}">{count:,}</td>'


def _mistakes(found: ConfusionChart) -> list[dict[str, str]]:
    shares = found.shares
    mistakes = [
        (count, row, column)
        for row, counts in enumerate(found.counts)
        for column, count in enumerate(counts)
        if count and row != column
    ]
    return [
        {
            "true class": middle_cut(found.names[row], MAX_NAME),
            "predicted": middle_cut(found.names[column], MAX_NAME),
            "samples": number(count),
            "of the class": percent(shares[row, column], 1),
        }
        for count, row, column in sorted(mistakes, key=lambda one: (-one[0], one[1:]))[:MAX_MISTAKES]
    ]
