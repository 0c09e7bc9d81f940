"""The loss scale that a run starts with, by a backward pass without an update: precision.scale.mode=auto.

Owns the size of that pass. It runs in fp32, so that a micro-batch which just fits in half precision may be
too large for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from launcher.checkpoint.generators import restore_states, states
from launcher.data.batch_plan import BatchPlan
from launcher.data.sources import Readable, trial_batches
from launcher.data.tensors import Batch
from launcher.distributed.collectives import exchange_texts
from launcher.errors import in_words
from launcher.process import frames
from launcher.process.shortage import ran_out
from launcher.recipe.contract import Recipe, loss_of
from launcher.training.device import free_memory
from launcher.training.run import Run
from launcher.training.setup.micro_batch import half_of


def calibrate(
    run: Run, recipe: Recipe, model: nn.Module, data: Readable, plan: BatchPlan, first: Sequence[Batch]
) -> None:
    """Choose the loss scale by `first`, this rank's first micro-batch, or none where it has no samples.

    Where a rank runs out of memory, by half as many samples on all ranks, as often as necessary; under
    model.sync_bn on several ranks the run ends there, because their passes wait for each other. A collective.
    """
    config, generators = run.config, states(run.env.device)
    total_steps, whole = config.train.total_steps(plan.steps_per_epoch), plan.largest_micro_batch
    while True:
        pieces = -(-whole // plan.largest_micro_batch)
        found, failure = _attempt(run, recipe, model, first, pieces)
        if not any(exchange_texts(run.env, failure)):
            return run.telemetry.decision("loss scale", _described(found, pieces))
        half = half_of(plan, config.data.augment.mixup, total_steps)
        if half is None:
            text = "auto: the backward pass that finds it, in fp32, does not fit in memory; starts at"
            return run.telemetry.decision("loss scale", f"{text} precision.scale.init")
        plan = replace(plan, micro_batch=half)
        first = trial_batches(data, plan, recipe.train_transform, 1)[:1]
        restore_states(generators, run.env.device)


def _attempt(
    run: Run, recipe: Recipe, model: nn.Module, first: Sequence[Batch], pieces: int
) -> tuple[int | None, str]:
    """The exponent, and what this rank ran out of. `first` is one of so many pieces of a micro-batch."""

    def dry() -> tuple[Tensor, float | Tensor]:
        of_batch = loss_of(recipe.loss, model, first[0])
        return of_batch.sum * pieces, of_batch.count * pieces

    alone = run.env.group is None or not run.config.model.sync_bn
    try:
        return run.stepper.calibrate(dry if first else None, agree_on_failure=alone), ""
    except Exception as error:
        if not alone:
            raise
        # A smaller one may be too small for a batch norm, which needs two samples.
        failure = ran_out(error) or (in_words(error) if pieces > 1 else "")
        if not failure:
            raise
        frames.release(error)
    free_memory(run.env.device)
    return None, failure


def _described(found: int | None, pieces: int) -> str:
    if found is None:
        return "auto: the first batch gives no usable gradient; starts at precision.scale.init"
    by = "the first batch" if pieces == 1 else f"1/{pieces} of a micro-batch, because no more fits in fp32"
    return f"auto: starts at 2^{found} = {2**found}, safe for {by}, within scale.min and scale.max"
