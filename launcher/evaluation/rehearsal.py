"""A trial of loss and metrics on a few samples, which finds mistakes of a recipe before the first step.

Owns the trial, in which nothing of a run may change: generators, buffers and the order of the data are as
before. The metrics have seen other samples, and another model, than in an evaluation: what depends on these
is reported and not raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from launcher.data.random_state import GeneratorsKept
from launcher.data.sources import Readable, first_batch
from launcher.distributed.env import WorkerEnv
from launcher.engine.works import all_reduce
from launcher.evaluation.evaluate import (
    Smaller,
    evaluating,
    in_smaller_batches,
    measure_batch,
    never_smaller,
)
from launcher.evaluation.measuring import Guard, Measuring, MetricValues, unguarded
from launcher.metrics.metric import declared_names, direction_of
from launcher.recipe.contract import Recipe


def rehearse(
    recipe: Recipe,
    model: nn.Module,
    forward_context: Callable[[], AbstractContextManager[object]],
    data: Readable,
    env: WorkerEnv,
    batch_size: int,
    guard: Guard = unguarded,
    beat: Callable[[], object] = lambda: None,
    smaller: Smaller = never_smaller,
) -> MetricValues:
    """What the metrics give for the first samples of each rank, with NaN for names that they only declare.

    The arguments are those of `evaluate`. Raises what an evaluation would raise, but for exceptions of a
    metric's `compute` that may be due to these samples: `MetricValues.failed` has their texts. A collective.
    """

    def measure(size: int) -> tuple[Tensor, Measuring]:
        sums = torch.zeros(2, dtype=torch.float64, device=env.device)  # of the losses, and their count
        measuring = Measuring(recipe, env, guard, beat, rehearsal=True)
        batch = first_batch(data, env.rank, env.world_size, size)
        if batch is not None:
            loss = measure_batch(recipe, model, forward_context, batch, measuring)
            sums[0] += loss.sum
            sums[1] += loss.count
        return sums, measuring

    with evaluating(model), torch.no_grad(), _unchanged(model, env.device):
        (sums, measuring), _ = in_smaller_batches(measure, batch_size, smaller)
        all_reduce(sums, env.group)
        loss_sum, count = sums.tolist()
        found = measuring.conclude(loss_sum, count or 1)
    for metric in recipe.measures:
        for name in declared_names(metric) or ():
            found.values.setdefault(name, float("nan"))
            found.higher_is_better.setdefault(name, direction_of(metric, name))
    return found


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the random states of the process and the device, and the model's buffers."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gpus = [device] if device.type == "cuda" else []
    try:
        with GeneratorsKept(), torch.random.fork_rng(gpus):
            yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
