"""The files that a run writes beside its checkpoints: result.json, the report, the plots, and `model/`.

`model/` holds what predicting needs besides the weights: classes and normalisation, and for a model of
`transformers` its config and tokenizer; `export RUN DIR/` copies it. A plot that cannot be written does not
fail the run; a result does.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from launcher.errors import StorageError, described, in_words
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
from launcher.run_dir.records import MODEL, REPORT, write_result
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


def facts_for_prediction(recipe: Recipe) -> dict[str, Any]:
    """The classes in the order of the logits, and the `normalisation` of images, where there are any.

    Mean and deviation are per channel, for pixels in 0..1.
    """
    transform = recipe.eval_transform and inspect.unwrap(recipe.eval_transform)
    facts = {
        "classes": None if recipe.classes is None else list(recipe.classes),
        "normalisation": getattr(transform, "normalisation", None),
    }
    return {name: value for name, value in facts.items() if value is not None}


def write_model_folder(
    run_dir: Path, recipe: Recipe, network: nn.Module, warn: Callable[[str], None]
) -> None:
    """Write what is known before the first step. Raises StorageError; other failures are warnings."""
    folder = run_dir / MODEL
    try:
        folder.mkdir(exist_ok=True)
        write_text(folder / "prediction.json", json.dumps(facts_for_prediction(recipe), indent=1) + "\n")
        config: Any = copy.deepcopy(getattr(network, "config", None))
        if callable(getattr(config, "save_pretrained", None)):  # of transformers
            config.architectures = [type(network).__name__]
            if recipe.classes is not None:
                config.id2label = dict(enumerate(recipe.classes))
                config.label2id = {name: number for number, name in enumerate(recipe.classes)}
            config.save_pretrained(folder)
        if callable(save := getattr(getattr(recipe.train, "tokenizer", None), "save_pretrained", None)):
            save(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    except Exception as error:  # of a config or tokenizer, which training does not need
        warn(f"{folder} is incomplete, and so is what export makes of it: {described(error)}")
