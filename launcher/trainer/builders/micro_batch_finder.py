"""The largest micro-batch that fits in memory, found by trying.

Owns the sizes among which a run may choose for itself, the trials of data.micro_batch_size=auto, which change
nothing of a run, and the choice by their results. A trial is a forward and backward pass on real samples,
with the buffers that a step of such micro-batches needs, in a step that is dropped on all ranks: weights,
BatchNorm statistics, loss scale and counters are kept, and the batches are made apart from those of the run.
What a trial draws changes nothing either: the generators are seeded before each micro-batch of a step.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.data.batch_plan import BatchPlan
from launcher.data.sources import trial_batches
from launcher.distributed.collectives import all_gather_str
from launcher.errors import OutOfMemoryError, counted, in_words
from launcher.os import frames, oom
from launcher.recipe.contract import loss_of
from launcher.trainer.context import TrainContext
from launcher.trainer.device import free_memory

PASSES = 2  # per trial: the second adds to the sums of the first


def candidate_sizes(plan: BatchPlan) -> list[int]:
    """The largest share of a rank, and half of the size before, rounded up, down to 1."""
    sizes = [plan.largest_share]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def next_smaller(plan: BatchPlan) -> int | None:
    """Half of the present micro-batch, rounded up; None for one sample."""
    return -(-plan.largest_micro_batch // 2) if plan.largest_micro_batch > 1 else None


def search(context: TrainContext) -> int:
    """The first of `candidate_sizes` that fits on all ranks, of a run that has not begun.

    A collective: all ranks make the same trials. Raises OutOfMemoryError on all ranks.
    """
    tried: dict[int, str] = {}
    plan = context.plan
    sizes = candidate_sizes(plan)
    size = next((size for size in sizes if _fits(context, size, tried)), None)
    last = next(reversed(tried.values()))
    if size is None:
        raise OutOfMemoryError(
            f"data.micro_batch_size=auto: not even {counted(sizes[-1], 'sample')} per rank and forward pass "
            f"fits in memory: {last}. Choose a smaller model or smaller samples, divide the optimizer's "
            "states among the ranks with ddp.shard_optimizer=true, or use devices with more memory."
        )
    parts = counted(replace(plan, micro_batch=size).micro_batches, "micro-batch", "es")
    text = (
        f"data.micro_batch_size=auto: {size} per rank and forward pass ({counted(len(tried), 'trial')}). "
        f"The update stays that of {plan.batch_size} samples, in up to {parts} per rank"
    )
    fitted = [[each, not failure] for each, failure in tried.items()]
    context.telemetry.decision("micro-batch", text, micro_batch=size, tried=fitted)
    return size


def _fits(context: TrainContext, size: int, tried: dict[int, str]) -> bool:
    """Whether it fits on all ranks. `tried` gets why not, by rank; empty if it does.

    Raises any other error than a lack of memory, as `_shortage`.
    """
    context.heartbeat.beat("trying micro-batches")
    failure = ""
    try:
        _pass(context, replace(context.plan, micro_batch=size))
    except Exception as error:
        failure = _shortage(error, smaller=bool(tried))
    # Whether it fitted or not: all ranks drop the step, by the same collectives.
    context.stepper.abandon()
    free_memory(context.env.device)
    texts = all_gather_str(context.env, failure)
    tried[size] = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    return not tried[size]


def _pass(context: TrainContext, plan: BatchPlan) -> None:
    """The passes of a step, but not compiled: that would take minutes for each size."""
    stepper = context.stepper
    stepper.set_micro_batches(plan.micro_batches)
    context.model.train()
    with context.heartbeat.in_user_code():
        batches = trial_batches(context.data.train, plan, context.recipe.train_transform, PASSES)[:PASSES]
    for batch in batches:
        # Not in_user_code: if another rank runs out of memory, this one waits in the loss, and must time out.
        with stepper.forward():
            output = loss_of(context.recipe.loss, context.model, batch)
        stepper.backward(output.sum, output.count)


def _shortage(error: Exception, smaller: bool) -> str:
    """What a pass ran out of. Raises any other error, but for a pass that is `smaller` than one before.

    That may be too small for a batch norm, which needs two samples.
    """
    failure = oom.oom_text(error) or (in_words(error) if smaller else "")
    if not failure:
        raise error
    frames.release(error)
    return failure
