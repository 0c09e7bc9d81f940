"""The files that a run writes at its end: result.json, the report, the plots.

Owns the summary of a finished run and the digest of its weights. A plot that cannot be written does not fail
the run; a result does.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.config.schema import Config
from launcher.distributed.collectives import exchange_texts
from launcher.distributed.env import LEADER, WorkerEnv
from launcher.engine import Stepper, WeightAverage
from launcher.engine.flat.names import named_buffers, named_parameters
from launcher.engine.replica import size_bytes
from launcher.errors import StorageError, in_words
from launcher.evaluation.comparison import comparison
from launcher.evaluation.confusion import Confusion
from launcher.evaluation.evaluate import Evaluation
from launcher.recipe.contract import ONLY_SET, Recipe, Used
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
from launcher.run_dir.status import FILE_NAME, mark_ended
from launcher.telemetry import Telemetry
from launcher.telemetry.events import ReportEvent
from launcher.training.progress import Totals

SPLIT = "split.csv"
PAGE_FILES: dict[str, Callable[[RunRecord], object]] = {
    CURVES: draw_curves,
    CONFUSION_MATRIX: draw_confusion_matrix,
    GRADIENTS: draw_gradients,
    REPORT: write_report,
}
MOST_CLASSES = 100  # in an event; a matrix of 1,000 would be a line of 3 MB


def weights_sha256(stepper: Stepper, env: WorkerEnv) -> str:
    """Digest of fp32 masters, frozen parameters and buffers in name order, little-endian bytes.

    A collective: all ranks get that of the leader, where alone sharded masters are gathered.
    """
    weights = _frozen(stepper) | stepper.named_masters(LEADER)
    return _digest(weights | named_buffers(stepper.model), env)


def ema_sha256(stepper: Stepper, average: WeightAverage, env: WorkerEnv) -> str:
    """Digest of averaged and frozen parameters, likewise. Without buffers, of which each rank has its own."""
    return _digest(_frozen(stepper) | average.state(LEADER).weights, env)


def _frozen(stepper: Stepper) -> dict[str, Tensor]:
    return {name: p.float() for name, p in named_parameters(stepper.model).items() if not p.requires_grad}


def _digest(tensors: Mapping[str, Tensor], env: WorkerEnv) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return exchange_texts(env, digest.hexdigest())[LEADER]


def result(
    config: Config,
    env: WorkerEnv,
    stepper: Stepper,
    used: Used,
    compare_by: str | None,
    evaluations: Mapping[str, Evaluation],
    totals: Totals,
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """The content of result.json, except what only the caller knows (steps and seconds).

    `compare_by` is that of the recipe.
    """
    counters = stepper.counters()
    content: dict[str, Any] = {
        "state": "done",
        "exit": 0,
        "recipe": config.recipe.name,
        "model": used.model,
        "data": used.data,
        "precision": config.precision.name,
        "world_size": env.world_size,
        **_measured(evaluations, compare_by),
        "applied_steps": counters["applied"],
        "skipped_steps": counters["skipped"],
        "scale": stepper.loss_scale,
        "samples_per_s": totals.samples / totals.seconds if totals.seconds else None,
        "training_seconds": totals.seconds,  # of the whole run; `seconds` are those of its last process
        "wire_bytes_per_step": totals.wire_bytes_per_step,
        "parameters": sum(p.numel() for p in stepper.model.parameters()),
        "state_bytes": stepper.state_bytes(),
        "weights_sha256": weights_sha256(stepper, env),
    }
    if average is not None:
        content["evaluated_weights"] = "ema"
        content["ema_sha256"] = ema_sha256(stepper, average, env)
        content["state_bytes"] += size_bytes(average.tensors())
    confusion = confusion_of(evaluations)
    if confusion is not None:
        content["classes"] = list(confusion.classes)
        content["confusion_matrix"] = confusion.counts.tolist()
    if env.device.type == "cuda":
        content["peak_memory_bytes"] = torch.cuda.max_memory_allocated(env.device)
    return content


def _measured(evaluations: Mapping[str, Evaluation], compare_by: str | None) -> dict[str, Any]:
    """What the last evaluation found, if there was one: `metrics` of the first set, `sets` of all by name."""
    if not evaluations:
        return {"metric_name": compare_by or "loss", "metric": None, "metrics": {}}
    compared = comparison(compare_by, evaluations)
    sets = {name: {"loss": found.loss, **found.metrics} for name, found in evaluations.items()}
    measured = {"metric_name": compared.name, "metric": compared.value, "metrics": next(iter(sets.values()))}
    measured["higher_is_better"] = not compared.lower_is_better
    return measured if ONLY_SET in sets else measured | {"sets": sets}


def confusion_of(evaluations: Mapping[str, Evaluation]) -> Confusion | None:
    """Of the first set; None where no classes were measured, and on all ranks but 0."""
    return next((found.confusion for found in evaluations.values()), None)


def write_files(
    run_dir: Path, content: dict[str, Any], confusion: Confusion | None, telemetry: Telemetry
) -> None:
    """The classification report, then result.json, which says that the run is done. Raises StorageError."""
    try:
        if confusion is not None:
            text = confusion.report()
            write_text(run_dir / "classification_report.txt", text)
            telemetry.emit(ReportEvent(content["steps"], text=text, **_tables(confusion)))
        write_result(run_dir, content)
    except OSError as error:
        raise StorageError(
            f"The result cannot be written to {run_dir}: {error}. The training itself is complete; "
            "make room and run it again."
        ) from error


def _tables(confusion: Confusion) -> dict[str, Any]:
    """For the trackers. Of many classes only the text: result.json has the matrix."""
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


def write_failure(run_dir: Path, state: str, exit_code: int, error: BaseException) -> None:
    """Write result.json of a run that failed or stopped. If that fails, the error is only in the log."""
    with contextlib.suppress(OSError):
        write_result(run_dir, {"state": state, "exit": exit_code, "error": in_words(error)})
    mark_end(run_dir, state, exit_code)


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
