"""What a run reports at its start and at its end. All ranks call these functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from launcher.data.tensors import TensorData
from launcher.run_dir.records import write_environment
from launcher.run_dir.result import Result
from launcher.telemetry.events import EndEvent, StartEvent
from launcher.training import results
from launcher.training.job import Job
from launcher.training.parts.evaluation import Evaluator
from launcher.training.progress import Start
from launcher.training.replicas import weights_sha256
from launcher.training.results import facts_for_prediction, write_model_folder
from launcher.training.run import asked
from launcher.training.setup.data_check import nan_warnings
from launcher.training.setup.decisions import decisions


def announce(job: Job, devices: Sequence[str], start: Start) -> None:
    """Report the decisions and the start of the run; record its environment."""
    run, run_dir = job.run, Path(job.run.config.run.dir)
    if run.env.is_leader:
        write_environment(run_dir, devices)
        results.write_split(run_dir, job.recipe)
        write_model_folder(run_dir, job.recipe, run.stepper.model, run.telemetry.warn)
        if isinstance(job.data.train, TensorData):
            for text in nan_warnings(job.data.train):
                run.telemetry.warn(text)
    for topic, text in decisions(run.config, run.env, devices, job.recipe, run.stepper, job.plan):
        run.telemetry.decision(topic, text)
    run.telemetry.emit(
        StartEvent(
            start.step,
            epochs=run.config.train.epochs,
            steps_per_epoch=job.course.steps_per_epoch,
            total_steps=job.course.total_steps,
            world_size=run.env.world_size,
            parameters=sum(p.numel() for p in job.model.parameters()),
            model=job.used.model,
            data=job.used.data,
            compare_by=job.recipe.compare_by,
            asked=asked(run.config),
        )
    )


def result_of(job: Job, since_step: int, steps: int, seconds: float) -> Result:
    """The content of result.json: what each run has, and what its parts add. A collective.

    `seconds` are of this process, for the steps after `since_step`; all ranks hold the same numbers.
    """
    run, stepper = job.run, job.run.stepper
    counters = stepper.counters()
    device, facts = run.env.device, facts_for_prediction(job.recipe)
    result = Result(
        state="done",
        exit=0,
        recipe=run.config.recipe.name,
        model=job.used.model,
        data=job.used.data,
        precision=run.config.precision.name,
        world_size=run.env.world_size,
        applied_steps=counters["applied"],
        skipped_steps=counters["skipped"],
        scale=stepper.loss_scale,
        parameters=sum(p.numel() for p in stepper.model.parameters()),
        state_bytes=stepper.state_bytes(),
        weights_sha256=weights_sha256(stepper, run.env),
        steps=steps,
        steps_per_epoch=job.course.steps_per_epoch,
        seconds=seconds,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        classes=facts.get("classes"),
        normalisation=facts.get("normalisation"),
        # What parts find out; a run without such a part has none.
        metric_name=None,
        metric=None,
        metrics={},
        samples_per_s=None,
        training_seconds=None,
        wire_bytes_per_step=None,
        micro_batch=None,
    )
    return job.parts.add_to(result)


def finish(job: Job, since_step: int, steps: int, seconds: float) -> None:
    """Report the result, and write it on rank 0. The arguments are those of `result_of`. A collective."""
    run, run_dir = job.run, Path(job.run.config.run.dir)
    result = result_of(job, since_step, steps, seconds)
    applied = run.stepper.counters()["applied"]
    if applied < steps / 2:
        run.telemetry.warn(
            f"only {applied} of {steps} steps were applied, the others skipped: lower "
            "precision.scale.init, or start with precision.scale.mode=auto."
        )
    if run.env.is_leader:
        results.write_files(run_dir, result, job.parts.of(Evaluator).confusion, run.telemetry)
    run.telemetry.emit(
        EndEvent(
            steps,
            state="done",
            exit=0,
            seconds=seconds,
            since_step=since_step,
            samples_per_s=result.samples_per_s,
            metrics=result.metrics,
            reason=job.parts.ends or None,
            weights_sha256=result.weights_sha256,
            step_time=result.step_time,
        )
    )
    if run.env.is_leader:
        results.mark_end(run_dir, "done", 0)
        # Last: the page is drawn from the files of the run, in which its end must stand.
        results.write_page(run_dir, run.telemetry)
