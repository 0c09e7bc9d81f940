"""Tries what a run needs later before its first step, so that it does not fail at the end of an epoch.

The last batch of an epoch may have one sample, on which a batch norm raises. The trial is a step that all
ranks drop: weights, buffers, optimizer and loss scale are those of a run without it.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.data.iterable_loader import IterableData
from launcher.data.sources import training_batches
from launcher.distributed.collectives import raise_on_all_ranks
from launcher.errors import counted
from launcher.evaluation.evaluate import unchanged
from launcher.trainer.context import TrainContext
from launcher.trainer.errors.recipe_errors import found_in_trial
from launcher.trainer.train_step import TrainStep


def try_smallest_batch(context: TrainContext, train_step: TrainStep) -> None:
    """Run the smallest batch of the plan forward and backward, if it is another than the first one.

    A collective: raises on all ranks alike. Not of a stream, whose end is not known, and not where batch
    norms communicate: a pass that fails on one rank would leave the others waiting in them.
    """
    plan = context.plan
    step = plan.smallest_step(context.length.total_steps)
    sizes = plan.sizes_by_rank(step)
    waits_for_others = context.config.model.sync_bn and context.env.group is not None
    if isinstance(context.data.train, IterableData) or waits_for_others or plan.is_even(step):
        return
    context.heartbeat.beat("trying the smallest batch")
    by_rank = "; ".join(
        f"{', '.join(map(str, each)) or 'none'} (rank {rank})" for rank, each in enumerate(sizes)
    )
    samples = counted(len(plan.global_batch(step)), "sample")
    what = f"the smallest batch: {samples} in step {step + 1} of an epoch, in micro-batches of {by_rank}"
    tried = replace(train_step, network=context.model)
    batches = training_batches(context.data.train, plan, context.recipe.train_transform, total_steps=0)
    with found_in_trial(what), raise_on_all_ranks(context.env), unchanged(context.model):
        context.model.train()
        try:
            with context.heartbeat.in_user_code():
                micro_batches = batches.trial(step, len(sizes[context.env.rank]))
            for batch in micro_batches:
                tried.forward_backward(batch)
        finally:
            context.heartbeat.beat("comparing the trials")  # from here on this rank may wait for another one
            context.stepper.abandon()  # on all ranks, whether the pass failed or not: by the same collectives
    train_step.checked_unregistered = tried.checked_unregistered
