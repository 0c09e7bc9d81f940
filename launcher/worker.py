"""One rank of one job, from its environment to its last file: the only module that uses all parts.

Owns the assembly of recipe, model, engine, data and telemetry from the resolved config, and what is written
at the end. It never sees argv; it runs the same lines on every rank.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

import torch

from launcher.config.schema import Config
from launcher.data.labels import Labels
from launcher.data.loader import loader_processes
from launcher.data.seeding import derive_seed, seed_all
from launcher.data.sources import DataSets, batch_plan, training_batches
from launcher.distributed import preflight, process_group
from launcher.distributed.env import LaunchEnv, WorkerEnv
from launcher.distributed.hang_timer import HangTimer
from launcher.distributed.heartbeat import Heartbeat
from launcher.doctor.machine import warn_of_machine
from launcher.engine.step_timer import PARTS
from launcher.process import allocator, torch_build
from launcher.process.signals import RankStopSignal, save_means_stop, signal_handlers_installed
from launcher.recipe import rank0
from launcher.recipe.contract import Used
from launcher.recipe.registry import load_recipe
from launcher.run_dir.records import logs_of_failure, rank_log
from launcher.telemetry import Telemetry, open_telemetry
from launcher.telemetry.gpu import measure_gpus
from launcher.telemetry.tracker.registry import refuse_unknown
from launcher.trainer import after_evaluation, device, ends, sanity_check
from launcher.trainer.answers import Answers
from launcher.trainer.builders import build, compilation, data_check
from launcher.trainer.builders.memory_format import choose_memory_format
from launcher.trainer.callbacks.checkpoints import Checkpoints
from launcher.trainer.callbacks.evaluation import Evaluator
from launcher.trainer.callbacks.initial_weights import InitialWeights, Loaded, load_weights
from launcher.trainer.callbacks.micro_batch import MicroBatch
from launcher.trainer.diagnostics.host_cost import host_ms_per_layer
from launcher.trainer.errors import rank_failure
from launcher.trainer.errors.recipe_errors import guarded, guarding
from launcher.trainer.job import Job
from launcher.trainer.loop import train
from launcher.trainer.part_list import build_callbacks
from launcher.trainer.progress import Course, Start
from launcher.trainer.resume import SavedRun
from launcher.trainer.run import Run
from launcher.trainer.task import Task
from launcher.trainer.warning_log import warnings_logged

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
    alone = launch.world_size == 1
    heartbeat = heartbeat or Heartbeat()
    run_dir = preflight.prepare_directory(config, launch)
    stop_signal = RankStopSignal(save_means_stop(config.launch.preempt_signals))
    with (
        # Left in reverse: the telemetry may still log, and signals stay requests until both are closed.
        signal_handlers_installed(stop_signal, alone),
        rank_log(run_dir, launch.rank, config.launch.log_level),
        # All sinks on rank 0, none elsewhere, so that callers need not check their rank.
        open_telemetry(config, os.environ) if launch.rank == 0 else Telemetry() as telemetry,
    ):
        log.info(
            "rank %d of %d, process %d on %s", launch.rank, launch.world_size, os.getpid(), gethostname()
        )
        try:
            with warnings_logged(telemetry, launch.rank):
                torch_build.warn_if_unchecked(torch.__version__)
                _join_and_run(config, launch, store, job, telemetry, stop_signal, heartbeat)
        except BaseException as error:
            # First, because explaining a failure takes time, and other ranks fail of this one meanwhile.
            if heartbeat.exit_records is not None:
                heartbeat.exit_records.mark_failed(launch.rank)
            rank_failure.log_traceback(launch.rank, error)
            logs = logs_of_failure(run_dir, launch.rank, launch.world_size)
            at_shortage = rank_failure.at_shortage(heartbeat.latest, config, launch.world_size)
            failure = rank_failure.failure_of(error, launch, logs, at_shortage)
            steps = max(telemetry.step, heartbeat.steps_done)  # events come every few steps only
            rank_failure.report_failure(telemetry, steps, run_dir, launch, failure or error)
            rank_failure.release_frames(error)
            if failure is not None:
                raise failure from error
            raise


def _join_and_run(
    config: Config,
    launch: LaunchEnv,
    store: dist.Store | None,
    job: str,
    telemetry: Telemetry,
    stop_signal: RankStopSignal,
    heartbeat: Heartbeat,
) -> None:
    heartbeat.beat("meeting the other ranks")
    steps_ahead = int(torch.cuda.is_available())
    with (
        # Left in reverse: the loader processes end, a failure is recorded, the group is closed.
        HangTimer(config, launch, store, job, heartbeat, steps_ahead) as timer,
        process_group.join(launch, store, job, config.launch.init_timeout_s) as env,
        timer.bounding_clean_up(),
        loader_processes(),
    ):
        device.apply_switches(config)
        if env.device.type == "cpu":
            allocator.keep_freed_memory()
        warn_of_machine(config, env)
        peers = preflight.meet(config, env, store, job)
        gpus = measure_gpus(config, env, peers, telemetry)
        assembled, loaded = _assemble(config, env, telemetry, heartbeat, stop_signal)
        saved = SavedRun(assembled)
        callbacks = build_callbacks(assembled, saved, loaded, peers, gpus, heartbeat.first_step_done)
        assembled.callbacks = assembled.run.reports.callbacks = callbacks
        heartbeat.beat("restoring")
        start = saved.resume(launch)
        callbacks.get(InitialWeights).check(saved.resumed)
        callbacks.get(MicroBatch).choose(start.step < assembled.course.total_steps, launch.halved)
        heartbeat.beat("data", start.step)
        ends.announce(assembled, [peer.device for peer in peers], start)
        _train(assembled, saved, start)


def _assemble(
    config: Config, env: WorkerEnv, telemetry: Telemetry, heartbeat: Heartbeat, stop_signal: RankStopSignal
) -> tuple[Job, Loaded | None]:
    """The job, and the weights of the file that the config names."""
    seed_all(config.seed, env.device)  # the same on all ranks: they make the same data
    heartbeat.beat("loading data")
    logs = logs_of_failure(Path(config.run.dir), env.rank, env.world_size)
    loading = rank0.entries_counted("loading data")
    with stop_signal.interruptible(env.group is None), heartbeat.in_user_code(), loading:
        with guarding(f'the function under @recipe("{config.recipe.uses}")', logs):
            recipe = guarded(load_recipe(config), logs)
        refuse_unknown(config.tracker)
        labels = None if recipe.classes is None else Labels(recipe.label, len(recipe.classes))
        held_out = recipe.validation_sets
        data = DataSets.of(config, env, recipe.train, held_out, recipe.collate, labels, heartbeat.reading)
        fingerprint = data_check.fingerprint(recipe, data.train, data.validation)  # reads some samples
    heartbeat.beat("comparing the data")
    data_check.compare_data(fingerprint, env)
    plan = batch_plan(config, env, data.train, recipe.lengths)
    course = Course.of(plan.steps_per_epoch, config.train, config.ddp.check_replicas_every_steps)
    heartbeat.beat("building the model")
    seed_all(derive_seed(config.seed, "model"), env.device)  # whatever was drawn while the data was read
    with heartbeat.in_user_code(), rank0.entries_counted("building the model"):
        model = build.build_model(config, recipe, env, plan)
        rates = build.rates_of(config, recipe, course.total_steps)
    decide = telemetry.decision
    choose_memory_format(config, env, recipe, model, data.train, plan, decide, heartbeat.in_user_code)
    weights = load_weights(config, model, env)
    heartbeat.beat("comparing the models")
    stepper = build.build_stepper(config, env, recipe, model, plan, rates)
    average = build.weight_average(config, stepper)
    run = Run(config, env, stepper, telemetry, heartbeat, stop_signal, average)
    host_ms = host_ms_per_layer(stepper.forward, env.device, stepper.policy.weights)
    used, answers = Used.of(config, recipe, model), Answers(env, None if labels is None else recipe.label)
    return Job(run, recipe, data, fingerprint, used, plan, course, model, answers, host_ms), weights


def _train(job: Job, saved: SavedRun, start: Start) -> None:
    """All steps from `start` on, and the result."""
    run, callbacks, steps_left = job.run, job.callbacks, start.step < job.course.total_steps
    say = partial(run.telemetry.decision, "resume")
    job.batches = training_batches(
        job.data.train, job.plan, job.recipe.train_transform, job.course.total_steps, saved.stream, say
    )
    micro_batch = callbacks.get(MicroBatch)
    task = Task(run.stepper, job.model, job.recipe.loss, job.batches, job.answers, micro_batch)
    task.stop_requested = run.is_asked_to_end
    if steps_left:
        sanity_check.try_loader_processes(job)
    if steps_left and not start.owes_evaluation:
        if (found := callbacks.get(Evaluator).rehearse()) is not None:
            callbacks.validate_metric_names(found)
        sanity_check.try_smallest_batch(job, task)
        after_evaluation.rehearse(job, start.step)
        run.heartbeat.beat("data")
    task.network = compilation.compiled(run.config.train.compile, job.model, run.stepper)
    began = time.perf_counter()
    run.stepper.clock.on_mark(run.heartbeat.entering(PHASE_AFTER))
    with callbacks.get(Checkpoints):
        callbacks.on_train_start(start.step)
        with micro_batch.explained():
            end = train(job, start, task)
    run.heartbeat.beat("finishing")
    ends.finish(job, start.step, end, time.perf_counter() - began)
    run.heartbeat.beat("done")
