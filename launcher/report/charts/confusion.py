"""Mistakes by class: the confusion matrix as a table and as a picture; of many classes the most frequent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from launcher.report.charts.picture import INK, SOFT, Canvas, rgb, text_length
from launcher.report.curve import FloatArray
from launcher.report.html import paragraph, picture, scrolled, table
from launcher.report.run_record import RunRecord
from launcher.telemetry.formatting import middle_cut, number, percent

MAX_CLASSES = 26  # of a table: the letters of the alphabet fit
MAX_MISTAKES = 25  # rows of the table
MAX_PICTURE_BYTES = 400_000  # embedded in the page; a larger one is only in its file
MAX_NAME = 60  # characters in a table
CAPTION = "rows: true class; columns: predicted"
STRONG = 0.55  # share from which on the text is bold
MAX_NAMED, MAX_COUNTED, MAX_DRAWN_NAME = 60, 30, 40  # of a picture: classes with names, counts; characters
SIDE, MAX_CELL = 1300, 44  # pixels of a picture's matrix, and of a cell
DEEP = 0.76  # opacity of a cell that holds its whole class, as on the page


@dataclass(frozen=True)
class ConfusionChart:
    """How many samples of each true class were predicted as each class."""

    counts: Sequence[Sequence[int]]
    names: list[str]
    of_set: str = ""

    @classmethod
    def of(cls, run: RunRecord) -> ConfusionChart | None:
        """None where no classes were counted, or where the result holds no square of counts."""
        counts, given = run.result.confusion_matrix, run.result.classes
        if not counts or any(len(row) != len(counts) or min(row) < 0 for row in counts):
            return None
        names = given if given and len(given) == len(counts) else map(str, range(len(counts)))
        return cls(counts, list(names), run.recording.sets[0] if run.recording.sets else "")

    @property
    def shares(self) -> FloatArray:
        """Each cell's share of its true class. The root of it is drawn, so that rare mistakes still show."""
        counts = np.array(self.counts, np.float64)
        shares: FloatArray = counts / np.maximum(counts.sum(axis=1)[:, None], 1)
        return shares

    @property
    def text(self) -> str:
        right, total = sum(row[k] for k, row in enumerate(self.counts)), sum(map(sum, self.counts))
        return f"{right:,} of {total:,} right{f' in {self.of_set}' if self.of_set else ''}."


def confusion_part(run: RunRecord) -> str:
    """The markup; "" where no classes were counted."""
    found = ConfusionChart.of(run)
    if found is None:
        return ""
    if len(found.counts) <= MAX_CLASSES:
        return paragraph(found.text) + _matrix(found)
    image = confusion_picture(found)
    return (
        paragraph(found.text)
        + table("Most frequent mistakes", _mistakes(found), texts=("true class", "predicted"))
        + picture(image if len(image) <= MAX_PICTURE_BYTES else b"", "confusion matrix")
    )


def _matrix(found: ConfusionChart) -> str:
    shares = found.shares
    heads = [(escape(name), escape(middle_cut(name, MAX_NAME))) for name in found.names]
    columns = "".join(f'<th scope="col" title="{name}">{shown}</th>' for name, shown in heads)
    rows = "".join(
        f'<tr><th scope="row" title="{name}">{shown}</th>'
        + "".join(_cell(count, shares[row, column], row == column) for column, count in enumerate(counts))
        + "</tr>\n"
        for row, ((name, shown), counts) in enumerate(zip(heads, found.counts, strict=True))
    )
    caption = f'<caption class="note">{CAPTION}</caption>'
    body = f'<table class="confusion">{caption}<tr><td></td>{columns}</tr>\n{rows}</table>'
    return scrolled("Confusion matrix", body)


def _cell(count: int, share: float, right: bool) -> str:
    kinds = [*(["wrong"] if not right else []), *(["strong"] if share >= STRONG else [])]
    shown = f' class="{" ".join(kinds)}"' if kinds else ""
    return f'<td{shown} style="--share:{100 * share**0.5:.0f}">{f"{count:,}" if count else ""}</td>'


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


def confusion_picture(found: ConfusionChart) -> bytes:
    """The matrix as a PNG: in each cell the share of its true class by colour, and of few classes the count.

    Columns have the numbers of the classes where the names do not fit.
    """
    num_classes = len(found.counts)
    cell = max(1, min(SIDE // num_classes, max(MAX_CELL, 340 // num_classes)))
    side, size = cell * num_classes, 12 if num_classes <= 15 else 9
    shown = range(0, num_classes, 1 if num_classes <= MAX_NAMED else num_classes // 10)
    names = [middle_cut(found.names[k], MAX_DRAWN_NAME) for k in shown]
    fits = num_classes <= MAX_NAMED and max(text_length(name, size) for name in names) < cell - 4
    numbers = [str(k) for k in shown]
    numbered = [k if name == k else f"{k}: {name}" for k, name in zip(numbers, names, strict=True)]
    rows, columns = (names, names) if fits else (numbered, numbers)
    left, top = max(text_length(name, size) for name in rows) + 24, 60
    canvas = Canvas(max(left + side + 60, 480), top + side + 44)
    colors = np.where(np.eye(num_classes, dtype=bool)[..., None], *(np.array(rgb(k)) for k in (0, 1)))
    strength = DEEP * np.sqrt(found.shares)[..., None]
    canvas.image((255 * (1 - strength) + colors * strength).round().astype(np.uint8), left, top, side)
    for k, row, column in zip(shown, rows, columns, strict=True):
        canvas.text((left - 6, top + (k + 0.5) * cell), row, size, "rm", SOFT)
        canvas.text((left + (k + 0.5) * cell, top + side + 14), column, size, "mm", SOFT)
    for y, counts in enumerate(found.counts if num_classes <= MAX_COUNTED else []):
        for x, count in enumerate(counts):
            place = (left + (x + 0.5) * cell, top + (y + 0.5) * cell)
            canvas.text(place, f"{count:,}" if count else "", size, "mm", INK)
    canvas.text((left, 20), found.text, 14, "lm", INK, is_bold=True)
    canvas.text((left, 42), CAPTION, 12, "lm", SOFT)
    return canvas.png()
