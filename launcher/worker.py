"""One rank of one job, from its environment to its last file: the only module that uses all parts.

Owns the assembly of recipe, model, engine, data and telemetry from the resolved config, and what is written
at the end. It never sees argv; it runs the same lines on every rank.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from launcher.checkpoint import Due, Writer
from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.data.loader import loader_processes
from launcher.data.sources import Batches, training_batches
from launcher.data.streamed import StreamData
from launcher.data.tensors import TensorData
from launcher.distributed.env import LaunchEnv, WorkerEnv
from launcher.distributed.failures import claim_first_failure, give_reason
from launcher.distributed.heartbeat import Heartbeat
from launcher.distributed.preflight import Peer, meet
from launcher.distributed.process_group import join, tighten
from launcher.distributed.watchdog import Watchdog
from launcher.engine.diagnostics.host_cost import host_ms_per_layer, num_layers
from launcher.engine.diagnostics.step_timer import PARTS
from launcher.process.allocator import keep_freed_memory
from launcher.process.signals import saving_stops
from launcher.process.torch_private import warn_if_unchecked
from launcher.recipe.contract import Recipe, Used
from launcher.recipe.load import load_recipe
from launcher.run_dir.records import logs_of_failure, rank_log, write_environment
from launcher.telemetry import Telemetry, open_telemetry
from launcher.telemetry.events import EndEvent, StartEvent
from launcher.telemetry.gpu import GpuSampler, measure_gpus
from launcher.telemetry.tracker.registry import refuse_unknown
from launcher.training import build, results
from launcher.training.answers import Answers
from launcher.training.divergence.rerun import DivergenceInspector
from launcher.training.failures.rank_failure import (
    failure_of,
    of_another_rank,
    release_frames,
    report_failure,
)
from launcher.training.failures.recipe_errors import guarded, guarding
from launcher.training.failures.shortage_advice import advice_for, place_of_shortage
from launcher.training.loop import Averaged, Task, train
from launcher.training.model_folder import facts_for_prediction, write_model_folder
from launcher.training.parts.bucket_trial import BucketTrial
from launcher.training.parts.checkpoints import Checkpoints
from launcher.training.parts.divergence import DivergenceCheck
from launcher.training.parts.evaluation import Evaluator
from launcher.training.parts.log import Monitor
from launcher.training.parts.relief import Relief
from launcher.training.parts.replica_check import Replicas
from launcher.training.parts.rescue import Rescue
from launcher.training.parts.step_times import of_the_slowest, overhead_ms
from launcher.training.parts.stragglers import Stragglers
from launcher.training.progress import Course, Start
from launcher.training.recorded_config import asked
from launcher.training.recorded_steps import recorded
from launcher.training.requests import Requests, heeded
from launcher.training.resume import Continuity
from launcher.training.run import Run, Votes
from launcher.training.setup.compilation import compiled
from launcher.training.setup.data_check import compare_data, nan_warnings
from launcher.training.setup.decisions import decisions
from launcher.training.setup.initial_weights import Loaded, load_weights, settle
from launcher.training.setup.micro_batch import settled
from launcher.training.setup.scale_start import calibrate
from launcher.training.warning_log import warnings_logged

if TYPE_CHECKING:
    import torch.distributed as dist

PHASE_AFTER = dict(itertools.pairwise((*PARTS, "report")))

log = logging.getLogger("launcher")


def run(
    config: Config,
    launch: LaunchEnv,
    store: dist.Store | None,
    job: str,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Train as the config says, as one rank. Raises on failure, a LauncherError where a user can act.

    `job` names this job among those of the launch: its process group and its keys in the store are its own.
    Resumes from a checkpoint if there is one. Raises PreemptedError if a signal asked the run to stop.
    """
    run_dir = Path(config.run.dir)
    alone = launch.world_size == 1
    heartbeat = heartbeat or Heartbeat()
    with (
        heeded(alone, saving_stops(config.launch.preempt_signals)) as requests,
        rank_log(run_dir, launch.rank, config.launch.log_level),
        _telemetry(config, launch) as telemetry,
    ):
        log.info(
            "rank %d of %d, process %d on %s", launch.rank, launch.world_size, os.getpid(), gethostname()
        )
        try:
            with warnings_logged(telemetry, launch.rank):
                warn_if_unchecked(torch.__version__)
                _join_and_run(config, launch, store, job, telemetry, requests, heartbeat)
        except BaseException as error:
            claim_first_failure(store, job, launch.rank, heartbeat.words)
            logs = logs_of_failure(run_dir, launch.rank, launch.world_size)
            beat = heartbeat.latest
            at_shortage = place_of_shortage(beat), advice_for(beat, config, launch.world_size)
            failure = failure_of(error, store, job, launch, logs, at_shortage)
            if not heartbeat.watched:  # else the parent reads how this rank leaves
                give_reason(store, job, launch.rank, failure or error)
            steps = max(telemetry.step, heartbeat.steps_done)  # events come every few steps only
            cause = of_another_rank(failure or error, store, job, launch, heartbeat.words)
            report_failure(telemetry, steps, run_dir, launch, cause)
            release_frames(error)
            if failure is not None:
                raise failure from error
            raise


def _telemetry(config: Config, launch: LaunchEnv) -> Telemetry:
    """All sinks on rank 0, none elsewhere, so that callers need not check their rank."""
    if launch.rank != 0:
        return Telemetry()
    return open_telemetry(config, os.environ, with_gpu=torch.cuda.is_available())


@dataclass
class _Job:
    """The parts of a running job."""

    run: Run
    recipe: Recipe
    data: build.DataSets
    used: Used
    plan: BatchPlan
    course: Course
    model: nn.Module
    continuity: Continuity
    weights: Loaded | None  # of the file that the config names
    host_ms: float  # per layer: what the host spends on it, however small

    def settle_micro_batch(self, start: Start) -> None:
        """Divide the batches as data.micro_batch says, or as in the run so far. A collective."""
        trying = start.step < self.course.total_steps
        self.plan = settled(
            self.run, self.continuity.standing, self.recipe, self.model, self.data.train, self.plan, trying
        )


def _join_and_run(
    config: Config,
    launch: LaunchEnv,
    store: dist.Store | None,
    job: str,
    telemetry: Telemetry,
    requests: Requests,
    heartbeat: Heartbeat,
) -> None:
    heartbeat.beat("meeting the other ranks")
    timeout_s = config.launch.init_timeout_s + _leeway_s(heartbeat)
    with (
        Watchdog(config, launch, store, job, heartbeat) as watchdog,
        join(launch, store, job, timeout_s) as env,
        watchdog.announcing(),
        loader_processes(),
    ):
        build.apply_switches(config)
        if env.device.type == "cpu":
            keep_freed_memory()
        peers = meet(config, env, store, job)
        gpus = measure_gpus(config, env, peers, telemetry)
        assembled = _assemble(config, env, telemetry, heartbeat, requests)
        heartbeat.beat("restoring")
        start = assembled.continuity.resume(launch.restart_count)
        settle(assembled.weights, assembled.run, assembled.continuity.standing, assembled.continuity.resumed)
        assembled.settle_micro_batch(start)
        heartbeat.beat("data", start.step)
        _announce(assembled, [peer.device for peer in peers], start)
        _train(assembled, start, watchdog, gpus, peers)


def _leeway_s(heartbeat: Heartbeat) -> float:
    """How much longer a collective may take than a phase, if phases are monitored.

    A rank that only waits must not fail before the rank that it waits for has been identified.
    """
    return 10.0 if heartbeat.watched else 0.0


def _assemble(
    config: Config, env: WorkerEnv, telemetry: Telemetry, heartbeat: Heartbeat, requests: Requests
) -> _Job:
    build.seed_generators(config.seed)  # the same on all ranks: they build the same data and model
    heartbeat.beat("loading data")
    logs = logs_of_failure(Path(config.run.dir), env.rank, env.world_size)
    with guarding(f'the function under @recipe("{config.recipe.uses}")', logs):
        recipe = guarded(load_recipe(config), logs)
    refuse_unknown(config.tracker)
    data = build.data_sets(config, recipe, env, heartbeat.reading)
    heartbeat.beat("comparing the data")
    fingerprint = compare_data(recipe, data.train, data.validation, env)
    plan = build.batch_plan(config, recipe, data.train, env)
    course = Course.of(plan.steps_per_epoch, config.train, config.consistency.every_steps)
    heartbeat.beat("building the model")
    model = build.build_model(config, recipe, env, plan)
    weights = load_weights(config, model, env)
    heartbeat.beat("comparing the models")
    stepper = build.build_stepper(config, env, recipe, model, plan, course.total_steps)
    build.seed_generators(config.seed + 1 + env.rank)  # from here on each rank draws its own dropout
    average = build.weight_average(config, stepper)
    run = Run(config, env, stepper, telemetry, heartbeat, requests, average)
    size = 0 if isinstance(data.train, StreamData) else plan.num_samples
    continuity = Continuity(run, course, size, fingerprint, Answers.of(recipe, env))
    host_ms = host_ms_per_layer(stepper.forward, env.device, stepper.policy.weights)
    used = Used.of(config, recipe, model)
    return _Job(run, recipe, data, used, plan, course, model, continuity, weights, host_ms)


def _announce(job: _Job, devices: Sequence[str], start: Start) -> None:
    """Report the decisions and the start of the run; record its environment."""
    run = job.run
    if run.env.is_leader:
        write_environment(Path(run.config.run.dir), devices)
        results.write_split(Path(run.config.run.dir), job.recipe)
        write_model_folder(Path(run.config.run.dir), job.recipe, run.stepper.model, run.telemetry.warn)
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


def _train(
    job: _Job, start: Start, watchdog: Watchdog, gpus: GpuSampler | None, peers: Sequence[Peer]
) -> None:
    """All steps from `start` on, and the result."""
    run, config, continuity, stepper = job.run, job.run.config, job.continuity, job.run.stepper
    batches, steps_left = _batches(job), start.step < job.course.total_steps
    inspector = DivergenceInspector(stepper, job.recipe.loss, batches, run.env.group)
    rescue = Rescue(run, continuity.standing, inspector)
    if config.precision.scale.mode == "auto" and not continuity.has_scale:
        _calibrate(job, batches, start)
    decide = run.telemetry.decision
    votes, trial = Votes(), BucketTrial(stepper, run.env.world_size, config.wire.shard, decide)
    stragglers = Stragglers(run, [peer.host for peer in peers])
    voters = (stragglers, trial) if run.env.world_size > 1 else ()  # alone there is nobody to compare with
    monitor = Monitor(
        run,
        votes,
        DivergenceCheck(config.precision.scale, inspector),
        rescue,
        build.gradient_stats(config, run.env, stepper, run.telemetry),
        continuity.totals,
        voters,
        first_step_done=partial(_first_step_done, run, watchdog),
    )
    evaluator = Evaluator(
        run,
        job.course,
        job.recipe,
        job.data.validation,
        job.model,
        monitor,
        votes,
        continuity.standing,
        continuity.answers,
        batches,
    )
    if steps_left and not start.owes_evaluation:
        evaluator.rehearse()
        run.heartbeat.beat("data")
    network = compiled(config.train.compile, job.model, stepper)
    began = time.perf_counter()
    stepper.clock.on_mark(run.heartbeat.entering(PHASE_AFTER))
    relief = Relief(run, continuity.standing, batches, continuity.answers)
    task = Task(stepper, network, job.recipe.loss, batches, continuity.answers, relief)
    with (
        recorded(task, run) if steps_left else nullcontext(task) as steps,
        Writer(continuity.directory, config.checkpoint.keep) as writer,
    ):
        if config.wire.bucket_mb == "auto":
            trial.begin(start.step, job.course.total_steps - start.step, is_recorded=steps is not task)
        due = Due(config.checkpoint.every_steps, config.checkpoint.every_s)
        with Checkpoints(run, job.course, monitor, votes, writer, due, continuity.take) as checkpoints:
            end = train(
                job.course,
                start,
                steps if run.average is None else Averaged(steps, run.average),
                checkpoints,
                monitor,
                Replicas(run, job.course),
                evaluator,
                relief,
                voters,
            )
    run.heartbeat.beat("finishing")
    seconds = time.perf_counter() - began
    _finish(job, batches.plan, monitor, evaluator, seconds, (start.step, end), gpus)
    run.heartbeat.beat("done")


def _batches(job: _Job) -> Batches:
    """The training batches of this rank; those of a stream continue where the checkpoint was taken."""
    batches = training_batches(
        job.data.train,
        job.plan,
        job.recipe.train_transform,
        job.course.total_steps,
        job.continuity.stream,
        partial(job.run.telemetry.decision, "resume"),
    )
    job.continuity.stream_position = batches.position
    return batches


def _calibrate(job: _Job, batches: Batches, start: Start) -> None:
    """Choose the loss scale by the first batch, if there is one left."""
    if start.step >= job.course.total_steps:
        return
    first = batches.step(*divmod(start.step, job.course.steps_per_epoch))
    calibrate(job.run, job.recipe, job.model, job.data.train, job.plan, first[:1])


def _first_step_done(run: Run, watchdog: Watchdog) -> None:
    """All ranks have started and compiled: from now on they wait for launch.stall_s at most."""
    tighten(run.env, run.config.launch.stall_s + _leeway_s(run.heartbeat))
    watchdog.tighten()
    run.heartbeat.first_step_done()


def _finish(
    job: _Job,
    plan: BatchPlan,
    monitor: Monitor,
    evaluator: Evaluator,
    seconds: float,
    steps_made: tuple[int, int],
    gpus: GpuSampler | None,
) -> None:
    """Report the result. `seconds` are of this process, for the steps after the first of `steps_made`.

    All ranks hold the same weights and numbers; rank 0 writes them to files.
    """
    run, run_dir, evaluations = job.run, Path(job.run.config.run.dir), evaluator.latest
    since_step, steps = steps_made
    result: dict[str, Any] = results.result(
        run.config,
        run.env,
        run.stepper,
        job.used,
        job.recipe.compare_by,
        evaluations,
        monitor.totals,
        run.average,
    )
    times = of_the_slowest(run.env, monitor.times)
    if times is not None:
        costs = (job.host_ms, num_layers(job.model), plan.micro_batches, run.stepper.num_trainable)
        result["step_time"] = times | {"overhead_ms": overhead_ms(times, *costs)}
    if result["applied_steps"] < steps / 2:
        run.telemetry.warn(
            f"only {result['applied_steps']} of {steps} steps were applied, the others skipped: lower "
            "precision.scale.init, or start with precision.scale.mode=auto."
        )
    if (source := job.continuity.standing.started_from) is not None:
        result["started_from"] = {"file": source[0], "sha256": source[1]}
    if evaluator.stopped:
        result["stopped_early"] = {"reason": evaluator.stopped, **asdict(run.config.early_stopping)}
    if gpus is not None and (joules := gpus.finish()) is not None:
        result["energy_kwh"] = joules / 3.6e6  # of the GPUs of this node
        if gpus.incomplete:
            result["energy_incomplete"] = True
    result |= {"steps": steps, "steps_per_epoch": job.course.steps_per_epoch, "seconds": seconds}
    result["micro_batch"] = plan.largest_micro_batch
    result |= facts_for_prediction(job.recipe)
    if run.env.is_leader:
        results.write_files(run_dir, result, results.confusion_of(evaluations), run.telemetry)
    run.telemetry.emit(
        EndEvent(
            steps,
            state="done",
            exit=0,
            seconds=seconds,
            since_step=since_step,
            samples_per_s=result["samples_per_s"],
            metrics=result["metrics"],
            reason=evaluator.stopped or None,
            weights_sha256=result["weights_sha256"],
            step_time=result.get("step_time"),
        )
    )
    if run.env.is_leader:
        results.mark_end(run_dir, "done", 0)
        results.write_page(run_dir, run.telemetry)
