"""Builds the trainer of one rank from the resolved config: recipe, model, engine, callbacks, resumed state.

Owns the order of what happens before the first step. It runs the same lines on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from launcher.checkpoint.checkpointer import Checkpointer
from launcher.checkpoint.run_state import identity_of
from launcher.config.schema import Config
from launcher.data.iterable_loader import IterableData
from launcher.data.labels import Labels
from launcher.data.seeding import derive_seed, seed_all
from launcher.data.sources import DataSets, batch_plan, training_batches
from launcher.distributed.env import LaunchEnv, WorkerEnv
from launcher.distributed.heartbeat import Heartbeat
from launcher.distributed.preflight import RankInfo
from launcher.engine.step_timer import PARTS
from launcher.os.signals import StopSignal
from launcher.recipe.registry import load_recipe
from launcher.run_dir.records import CHECKPOINTS, logs_of_failure
from launcher.telemetry import Telemetry
from launcher.telemetry.gpu import GpuSampler
from launcher.telemetry.tracker.registry import refuse_unknown
from launcher.trainer import after_evaluation, results
from launcher.trainer.build_callbacks import build_callbacks
from launcher.trainer.builders import build, data_check
from launcher.trainer.builders.pretrained_weights import LoadReport, load_weights, report_weights
from launcher.trainer.callbacks.micro_batch import MicroBatch
from launcher.trainer.context import TrainContext
from launcher.trainer.errors.recipe_errors import guarding, wrap_recipe
from launcher.trainer.evaluation_loop import EvaluationLoop
from launcher.trainer.progress import TrainLength
from launcher.trainer.resume import resume
from launcher.trainer.train_accuracy import TrainAccuracy
from launcher.trainer.train_step import TrainStep
from launcher.trainer.trainer import Trainer

# The phase that begins when a part ends: data -> compute -> ...
PHASE_AFTER = dict(itertools.pairwise((*PARTS, "report")))


def build_trainer(
    config: Config,
    launch: LaunchEnv,
    env: WorkerEnv,
    peers: Sequence[RankInfo],
    gpus: GpuSampler | None,
    telemetry: Telemetry,
    heartbeat: Heartbeat,
    stop_signal: StopSignal,
) -> Trainer:
    """A trainer that is ready for its first step, the state of a checkpoint loaded. A collective."""
    context, loaded = _build_context(config, env, gpus, telemetry, heartbeat, stop_signal)
    checkpointer = _build_checkpointer(context)
    micro_batch = MicroBatch(context)
    context.callbacks.fill(build_callbacks(context, checkpointer, micro_batch, peers))
    heartbeat.beat("restoring")
    start = resume(context, checkpointer, launch)
    report_weights(context, loaded, start.from_checkpoint)
    steps_left = start.step < context.length.total_steps
    # After the checkpoint, which may have the size; before all that divides batches.
    micro_batch.choose(steps_left, launch.micro_batch)
    next_step = start.step if start.evaluation_pending else start.step + 1
    heartbeat.beat("data", next_step if start.step else 0)  # 0: before the first step of a new run
    results.log_start(context, [peer.device for peer in peers], start)
    transform, steps = context.recipe.train_transform, context.length.total_steps
    context.batches = training_batches(context.data.train, context.plan, transform, steps, start.stream)
    train_step, evaluation = TrainStep(context), EvaluationLoop(context)
    if steps_left and not start.evaluation_pending:
        # What the run needs later, so that it does not fail at the end of an epoch.
        evaluation.sanity_check()
        after_evaluation.sanity_check(context, start.step)
        heartbeat.beat("data")
    context.stepper.clock.on_mark = heartbeat.phase_setter(PHASE_AFTER)
    if config.train.compile:  # after the trials, which are not compiled, as evaluations are not
        train_step.network = build.compiled(context.model, context.stepper)
    return Trainer(context, train_step, evaluation, start)


def _build_checkpointer(context: TrainContext) -> Checkpointer:
    config, stepper = context.config, context.stepper
    num_samples = 0 if isinstance(context.data.train, IterableData) else context.plan.num_samples
    identity = identity_of(config, stepper.model, num_samples)
    folder = Path(config.run.dir) / CHECKPOINTS
    return Checkpointer(folder, config.checkpoint.keep, context.env, stepper, context.ema, identity)


def _build_context(
    config: Config,
    env: WorkerEnv,
    gpus: GpuSampler | None,
    telemetry: Telemetry,
    heartbeat: Heartbeat,
    stop_signal: StopSignal,
) -> tuple[TrainContext, LoadReport | None]:
    """What the parts of the trainer share, in the order in which it can be built.

    And what the model took of the file of model.init_from.
    """
    seed_all(config.seed, env.device)  # the same on all ranks: they make the same data
    heartbeat.beat("loading data")
    logs = logs_of_failure(Path(config.run.dir), env.rank, env.world_size)
    with heartbeat.in_user_code():
        with guarding(f'the function under @recipe("{config.recipe.uses}")', logs):
            recipe = wrap_recipe(load_recipe(config), logs)
        refuse_unknown(config.tracker)
        labels = None if recipe.classes is None else Labels(recipe.label_column, len(recipe.classes))
        data = DataSets.of(config, env, recipe.train, recipe.validation_sets, recipe.collate, labels)
        # Reads some samples.
        data_fingerprint = data_check.data_fingerprint(recipe, data.train, data.validation)
    heartbeat.beat("comparing the data")
    data_check.compare_data(data_fingerprint, env)
    plan = batch_plan(config, env, data.train, recipe.lengths)
    length = TrainLength.of(plan.steps_per_epoch, config.train)
    heartbeat.beat("building the model")
    seed_all(derive_seed(config.seed, "model"), env.device)  # whatever was drawn while the data was read
    with heartbeat.in_user_code():
        model = build.build_model(config, recipe, env, plan)
        rates = build.lr_table(config, recipe, length.total_steps)
    weights = load_weights(config, model, env)
    heartbeat.beat("comparing the models")
    stepper = build.build_stepper(config, env, recipe, model, plan, rates)
    context = TrainContext(
        config=config,
        env=env,
        telemetry=telemetry,
        heartbeat=heartbeat,
        stop_signal=stop_signal,
        recipe=recipe,
        data=data,
        data_fingerprint=data_fingerprint,
        plan=plan,
        length=length,
        model=model,
        stepper=stepper,
        train_accuracy=TrainAccuracy(env, None if labels is None else recipe.label_column),
        ema=build.weight_average(config, stepper),
        gpus=gpus,
    )
    return context, weights
