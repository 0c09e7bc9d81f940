"""Mistakes by class: the confusion matrix as a table, or the most frequent mistakes of many classes."""

from __future__ import annotations

from html import escape
from typing import Any

from launcher.report.html import paragraph, picture, scrolled, table
from launcher.report.run_record import RunRecord
from launcher.telemetry.formatting import number

MAX_CLASSES = 26  # of a table
MAX_MISTAKES = 25
MAX_PICTURE_BYTES = 400_000
MAX_NAME = 60
STRONG = 0.55  # share from which on the text is bold
Counts = list[list[int]]


def confusion_part(run: RunRecord) -> str:
    """The markup; "" where no classes were counted."""
    counts = counts_of(run.result.get("confusion_matrix"))
    if not counts:
        return ""
    given = run.result.get("classes")
    names = [str(name) for name in given] if isinstance(given, list) and len(given) == len(counts) else []
    names = names or [str(k) for k in range(len(counts))]
    right, total = sum(row[k] for k, row in enumerate(counts)), sum(map(sum, counts))
    of_set = f" in {run.recording.sets[0]}" if run.recording.sets else ""  # only the first is counted
    text = paragraph(f"{right:,} of {total:,} right{of_set}.")
    if len(counts) <= MAX_CLASSES:
        return text + _matrix(counts, names)
    image = run.confusion_picture if len(run.confusion_picture) <= MAX_PICTURE_BYTES else b""
    return (
        text
        + table("Most frequent mistakes", _mistakes(counts, names), texts=("true class", "predicted"))
        + picture(image, "confusion matrix")
    )


def counts_of(value: Any) -> Counts:
    """The matrix where it is one: square, of counts; else an empty one."""
    if not isinstance(value, list) or not all(
        isinstance(row, list) and len(row) == len(value) for row in value
    ):
        return []
    if not all(type(count) is int and count >= 0 for row in value for count in row):
        return []
    return value


def _matrix(counts: Counts, names: list[str]) -> str:
    head = "".join(f'<th scope="col" title="{escape(name)}">{escape(_cut(name))}</th>' for name in names)
    rows = []
    for k, row in enumerate(counts):
        total = max(1, sum(row))
        cells = "".join(_cell(count, count / total, column == k) for column, count in enumerate(row))
        rows.append(
            f'<tr><th scope="row" title="{escape(names[k])}">{escape(_cut(names[k]))}</th>{cells}</tr>\n'
        )
    caption = '<caption class="note">rows: true class; columns: predicted</caption>'
    body = f'<table class="confusion">{caption}<tr><td></td>{head}</tr>\n{"".join(rows)}</table>'
    return scrolled("Confusion matrix", body)


def _cell(count: int, share: float, right: bool) -> str:
    kinds = [*(["wrong"] if not right else []), *(["strong"] if share >= STRONG else [])]
    shown = f' class="{" ".join(kinds)}"' if kinds else ""
    # The root of the share, so that a few mistakes among many samples still show.
    return f'<td{shown} style="--share:{100 * share**0.5:.0f}">{f"{count:,}" if count else ""}</td>'


def _mistakes(counts: Counts, names: list[str]) -> list[dict[str, str]]:
    found = [
        (count, row, column)
        for row, line in enumerate(counts)
        for column, count in enumerate(line)
        if count and row != column
    ]
    return [
        {
            "true class": _cut(names[row]),
            "predicted": _cut(names[column]),
            "samples": number(count),
            "of the class": f"{count / max(1, sum(counts[row])):.1%}".replace("%", " %"),
        }
        for count, row, column in sorted(found, key=lambda one: (-one[0], one[1:]))[:MAX_MISTAKES]
    ]


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."
