"""The files that a run writes at its end: result.json, the report, the plots.

A plot that cannot be written does not fail
the run; a result does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.errors import StorageError, in_words
from launcher.evaluation.confusion import Confusion
from launcher.recipe.contract import Recipe
from launcher.report.page import write_report
from launcher.report.pictures import (
    CONFUSION_MATRIX,
    CURVES,
    GRADIENTS,
    draw_confusion_matrix,
    draw_curves,
    draw_gradients,
)
from launcher.report.run_record import RunRecord
from launcher.run_dir.atomic import write_text
from launcher.run_dir.records import REPORT, write_result
from launcher.run_dir.result import Result
from launcher.run_dir.status import FILE_NAME, mark_ended
from launcher.telemetry import Telemetry
from launcher.telemetry.events import ReportEvent

SPLIT = "split.csv"
PAGE_FILES: dict[str, Callable[[RunRecord], object]] = {
    CURVES: draw_curves,
    CONFUSION_MATRIX: draw_confusion_matrix,
    GRADIENTS: draw_gradients,
    REPORT: write_report,
}
MOST_CLASSES = 100  # in an event; a matrix of 1,000 would be a line of 3 MB


def write_files(run_dir: Path, result: Result, confusion: Confusion | None, telemetry: Telemetry) -> None:
    """The classification report, then result.json, which says that the run is done. Raises StorageError."""
    try:
        if confusion is not None:
            text = confusion.report()
            write_text(run_dir / "classification_report.txt", text)
            telemetry.emit(ReportEvent(result.steps or 0, text=text, **_tables(confusion)))
        write_result(run_dir, result)
    except OSError as error:
        raise StorageError(
            f"The result cannot be written to {run_dir}: {error}. The training itself is complete; "
            "make room and run it again."
        ) from error


def _tables(confusion: Confusion) -> dict[str, Any]:
    """The confusion matrix for the trackers; none for many classes: result.json has it."""
    if len(confusion.classes) > MOST_CLASSES:
        return {}
    matrix = confusion.counts.tolist()
    return {"table": confusion.table(), "classes": list(confusion.classes), "confusion_matrix": matrix}


def write_split(run_dir: Path, recipe: Recipe) -> None:
    """The files of a data set that lists them, with label and split: split.csv. Raises StorageError."""
    listing = getattr(recipe.train, "listing", None)
    text = getattr(listing, "csv_text", None)
    if not callable(text):
        return
    try:
        write_text(run_dir / SPLIT, text())
    except OSError as error:
        raise StorageError(f"{run_dir / SPLIT} cannot be written: {error.strerror}") from error


def mark_end(run_dir: Path, state: str, exit_code: int) -> None:
    """Write status.json again, with the reserve where the disk is full."""
    with contextlib.suppress(OSError):
        mark_ended(run_dir / FILE_NAME, state, exit_code)


def write_page(run_dir: Path, telemetry: Telemetry) -> None:
    """Write pictures and report.html, from the files of the run alone; a failure of one is a warning."""
    run = None
    for name, write in PAGE_FILES.items():
        try:
            run = run or RunRecord.read(run_dir)
            write(run)
        except Exception as error:  # a plot must not fail a run that is complete, nor cost the other files
            reason = " ".join(in_words(error).split())
            telemetry.warn(f"{name} could not be drawn: {type(error).__name__}: {reason}")
