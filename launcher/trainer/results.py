"""What a run reports and writes at its start and its end: all ranks call `log_start` and `write_results`.

Owns result.json, the report, and `model/`, which holds what predicting needs besides the weights:
classes and normalisation, and for a model of `transformers` its config and tokenizer; `export RUN DIR/`
copies it. A report that cannot be written does not fail the run; a result does.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from launcher.errors import StorageError, counted, described
from launcher.evaluation.prediction import FACTS, facts_of
from launcher.metrics.confusion import Confusion
from launcher.recipe.contract import data_name, model_name, normalisation_of
from launcher.report import page
from launcher.report.run import Run
from launcher.run_dir import records, status
from launcher.run_dir.atomic import write_text
from launcher.run_dir.result import Result
from launcher.telemetry import Telemetry
from launcher.telemetry.events import EndEvent, ReportEvent, StartEvent
from launcher.trainer.builders.decisions import decisions
from launcher.trainer.context import TrainContext
from launcher.trainer.evaluation_loop import EvaluationLoop
from launcher.trainer.progress import ResumePoint
from launcher.trainer.replica_consistency import weights_sha256

MOST_CLASSES = 100  # in an event; a matrix of 1,000 would be a line of 3 MB: result.json has it


def write_files(run_dir: Path, result: Result, confusion: Confusion | None, telemetry: Telemetry) -> None:
    """The classification report, then result.json, which says that the run is done. Raises StorageError."""
    try:
        if confusion is not None:
            text, counts, tables = confusion.report(), confusion.counts.tolist(), dict[str, Any]()
            if len(confusion.classes) <= MOST_CLASSES:
                classes = list(confusion.classes)
                tables = {"table": confusion.table(), "classes": classes, "confusion_matrix": counts}
            write_text(run_dir / "classification_report.txt", text)
            telemetry.emit(ReportEvent(result.steps or 0, text=text, **tables))
        records.write_result(run_dir, result)
    except OSError as error:
        raise StorageError(
            f"The result cannot be written to {run_dir}: {error}. The training itself is complete; "
            "make room and run it again."
        ) from error


def write_page(run_dir: Path, telemetry: Telemetry) -> None:
    """Write report.html from the files of the run alone. A failure is a warning."""
    try:
        page.write_report(Run.read(run_dir))
    except Exception as error:  # a page must not fail a run that is complete
        telemetry.warn(f"{records.REPORT} could not be drawn: {described(error)}")


def write_model_folder(context: TrainContext) -> None:
    """Write what is known before the first step. Raises StorageError; other failures are warnings."""
    recipe, network = context.recipe, context.stepper.model
    folder = Path(context.config.run.dir) / records.MODEL
    try:
        folder.mkdir(exist_ok=True)
        facts = facts_of(recipe, context.config.recipes.path)
        write_text(folder / FACTS, json.dumps(facts, indent=1) + "\n")
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
        context.telemetry.warn(
            f"{folder} is incomplete, and so is what export makes of it: {described(error)}"
        )


def log_start(context: TrainContext, devices: Sequence[str], start: ResumePoint) -> None:
    """Report the decisions and the start of the run; record its environment."""
    if context.env.is_rank0:
        records.write_environment(Path(context.config.run.dir), devices)
        write_model_folder(context)
    for topic, text in decisions(
        context.config, context.env, devices, context.recipe, context.stepper, context.plan
    ):
        context.telemetry.decision(topic, text)
    context.telemetry.emit(
        StartEvent(
            start.step,
            epochs=-(-context.length.total_steps // context.length.steps_per_epoch),
            steps_per_epoch=context.length.steps_per_epoch,
            total_steps=context.length.total_steps,
            world_size=context.env.world_size,
            parameters=sum(p.numel() for p in context.model.parameters()),
            model=model_name(context.recipe, context.model),
            data=data_name(context.config, context.recipe),
            monitor=context.recipe.monitor,
        )
    )


def result_of(context: TrainContext, steps: int, seconds: float) -> Result:
    """The content of result.json: what each run has, and what its callbacks add. A collective.

    `seconds` are of this process; all ranks hold the same numbers.
    """
    stepper = context.stepper
    counters = stepper.counters()
    device = context.env.device
    joules = None if context.gpus is None else context.gpus.finish()  # ends the measurement
    result = Result(
        state="done",
        exit=0,
        recipe=context.config.recipe.name,
        model=model_name(context.recipe, context.model),
        data=data_name(context.config, context.recipe),
        precision=context.config.precision.name,
        world_size=context.env.world_size,
        applied_steps=counters["applied_steps"],
        skipped_steps=counters["skipped_steps"],
        scale=stepper.loss_scale,
        parameters=sum(p.numel() for p in stepper.model.parameters()),
        state_bytes=stepper.state_bytes(),
        weights_sha256=weights_sha256(stepper, context.env),
        steps=steps,
        steps_per_epoch=context.length.steps_per_epoch,
        seconds=seconds,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        classes=None if context.recipe.classes is None else list(context.recipe.classes),
        normalisation=normalisation_of(context.recipe),
        energy_kwh=None if joules is None else joules / 3.6e6,
        # Placeholders: EvaluationLoop sets the first three, ThroughputTotals and MicroBatch the others.
        metric_name=None,
        metric=None,
        metrics={},
        samples_per_s=None,
        training_seconds=None,
        wire_bytes_per_step=None,
        micro_batch=None,
    )
    return context.callbacks.add_to_result(result)


def write_results(
    context: TrainContext, since_step: int, steps: int, seconds: float, evaluation: EvaluationLoop
) -> None:
    """Report the result, and write it on rank 0. A collective.

    The process has trained for `seconds`, from `since_step` to `steps`.
    """
    run_dir = Path(context.config.run.dir)
    result = evaluation.add_to_result(result_of(context, steps, seconds))
    applied = result.applied_steps or 0
    if applied < steps / 2:
        outliers = result.outlier_steps or 0
        advice = "lower precision.loss_scale.init_scale."
        if outliers > (steps - applied) / 2:
            advice = f"{outliers} of them as outliers: raise precision.skip_outliers."
        context.telemetry.warn(
            f"only {applied} of {counted(steps, 'step')} were applied, the others skipped: {advice}"
        )
    if context.env.is_rank0:
        write_files(run_dir, result, evaluation.confusion, context.telemetry)
    context.telemetry.emit(
        EndEvent(
            steps,
            state="done",
            exit=0,
            seconds=seconds,
            since_step=since_step,
            samples_per_s=result.samples_per_s,
            metrics=result.metrics,
            metric_name=result.metric_name,
            best_metric=result.best_metric,
            best_step=result.best_step,
            reason=context.callbacks.stop_reason or None,
            weights_sha256=result.weights_sha256,
            step_time=result.step_time,
        )
    )
    if context.env.is_rank0:
        with contextlib.suppress(OSError):
            status.mark_ended(run_dir / status.FILE_NAME, "done", 0)
        # Last: the page is drawn from the files of the run, in which its end must stand.
        write_page(run_dir, context.telemetry)
