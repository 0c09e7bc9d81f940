"""Exact evaluation on any number of ranks.

Owns the pass over a set, in which every sample counts exactly once; `measuring` owns the metrics.
Communicates only after the pass: ranks may have unequal shares, or none. Requires the same weights and
buffers on all ranks. Never changes them, and restores the mode of each module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from launcher.config.user_code import defined_at
from launcher.data.sources import Readable, evaluation_batches
from launcher.data.streamed import StreamData
from launcher.data.tensors import Batch, transformed
from launcher.distributed.collectives import reduce
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError, DataError
from launcher.evaluation.confusion import Confusion
from launcher.evaluation.measuring import Guard, Measuring, rows_with_nan, unguarded
from launcher.recipe.contract import Loss, Recipe, loss_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Evaluation:
    """The result over a whole set, the same on all ranks."""

    loss: float  # mean over all samples (or tokens)
    samples: int  # that were measured
    metrics: dict[str, float]
    higher_is_better: dict[str, bool | None]  # by metric; None: not declared
    nan_outputs: int = 0  # samples with a NaN among the outputs that metrics read
    unreadable: int = 0  # samples that were left out
    halvings: int = 0  # of the batches of ranks that ran out of memory
    confusion: Confusion | None = None  # where classes were measured; on rank 0 only


class Interrupted(Exception):
    """A rank stopped before the end of its share, so there is no result. Raised on all ranks alike."""


@dataclass(frozen=True)
class _Counts:
    """The loss and the counts of one rank. Their sum over the ranks is that of the whole set."""

    sums: Tensor  # fp64 [2]: of the losses, and of their counts, which are weights where samples have some
    # int64 [5 + samples]: interrupted, NaN outputs, samples, unreadable, halvings of the batches;
    # how often each was seen
    integers: Tensor

    @classmethod
    def empty(cls, num_samples: int, device: torch.device) -> _Counts:
        return cls(
            torch.zeros(2, dtype=torch.float64, device=device),
            torch.zeros(5 + num_samples, dtype=torch.int64, device=device),
        )

    @property
    def interrupted(self) -> Tensor:
        return self.integers[0]

    @property
    def seen(self) -> Tensor:
        return self.integers[5:]

    def add(self, indices: Tensor, loss: Loss) -> None:
        """Count a batch. indices: int64 [n]."""
        self.sums[0] += loss.sum
        self.sums[1] += loss.count
        self.integers[1].add_(rows_with_nan(loss.outputs))
        self._add_samples(indices)

    def add_unreadable(self, indices: Tensor) -> None:
        """Count samples that were left out. indices: int64 [n]."""
        self.integers[3] += len(indices)
        self._add_samples(indices)

    def _add_samples(self, indices: Tensor) -> None:
        self.integers[2] += len(indices)
        if len(self.seen):  # a stream has no size and no indices
            self.seen.index_add_(0, indices, torch.ones_like(indices))

    def totals(self) -> Totals:
        """The sums over all ranks, once they are reduced. Waits for the device."""
        _, nan_outputs, samples, unreadable, halvings = self.integers[:5].tolist()
        loss_sum, counted = self.sums.tolist()
        return Totals(loss_sum, counted, nan_outputs, samples - unreadable, unreadable, halvings)


class Totals(NamedTuple):
    """The sums over a whole set."""

    loss_sum: float
    counted: float  # samples or tokens that carry loss, or their weights
    nan_outputs: int
    samples: int  # that were measured
    unreadable: int
    halvings: int


Smaller = Callable[[Exception, int], int]  # from an error and the size of a batch; raises what is no shortage


def never_smaller(error: Exception, size: int) -> int:
    """Raises the error."""
    raise error


def in_smaller_batches(measure: Callable[[int], Result], size: int, smaller: Smaller) -> tuple[Result, int]:
    """What `measure` returns for batches of `size`, or from the start for `smaller` ones; how often halved.

    For a part that does not communicate: each rank may need another size.
    """
    for halvings in itertools.count():
        try:
            return measure(size), halvings
        except Exception as error:
            size = smaller(error, size)
    raise AssertionError("itertools.count() has no end")


def evaluate(
    recipe: Recipe,
    model: nn.Module,
    forward_context: Callable[[], AbstractContextManager[Any]],
    data: Readable,
    env: WorkerEnv,
    batch_size: int,
    interrupted: Callable[[], bool] = lambda: False,
    guard: Guard = unguarded,
    beat: Callable[[], object] = lambda: None,
    smaller: Smaller = never_smaller,
) -> Evaluation:
    """Measure the model on `data` (on the device, whole on every rank). A collective.

    `guard` is the context of each call of a metric. `beat` is called before each message to rank 0.
    `smaller` gives the size of the batches with which a rank begins again after an error. Raises Interrupted,
    on all ranks, if `interrupted` was true before a batch on any of them.
    """

    def measure(size: int) -> tuple[_Counts, Measuring]:
        counts = _Counts.empty(0 if isinstance(data, StreamData) else len(data), env.device)
        measuring = Measuring(recipe, env, guard, beat)
        batches = evaluation_batches(data, env.rank, env.world_size, size)
        _measure_share(recipe, model, forward_context, batches, interrupted, counts, measuring)
        return counts, measuring

    with evaluating(model), torch.no_grad():
        (counts, measuring), halvings = in_smaller_batches(measure, batch_size, smaller)
        counts.integers[4] = halvings
        reduce(counts.integers, env.group)
        reduce(counts.sums, env.group)
        if counts.interrupted:
            raise Interrupted
        check_every_sample_once(counts.seen, env.world_size)
        totals = counts.totals()
        refuse_no_loss(totals.counted, totals.samples)
        found = measuring.conclude(totals.loss_sum, totals.counted)
    return Evaluation(
        totals.loss_sum / totals.counted,
        totals.samples,
        found.values,
        found.higher_is_better,
        totals.nan_outputs,
        totals.unreadable,
        totals.halvings,
        found.confusion,
    )


def _measure_share(
    recipe: Recipe,
    model: nn.Module,
    forward_context: Callable[[], AbstractContextManager[Any]],
    batches: Iterable[tuple[Tensor, Batch | None]],
    interrupted: Callable[[], bool],
    counts: _Counts,
    measuring: Measuring,
) -> None:
    """Add this rank's batches to the counts and the metrics. Stops at the first one that is interrupted."""
    for indices, batch in batches:
        if interrupted():
            counts.interrupted.fill_(1)
            return
        if batch is None:  # samples that could not be read and may be left out
            counts.add_unreadable(indices)
            continue
        counts.add(indices, measure_batch(recipe, model, forward_context, batch, measuring))


def measure_batch(
    recipe: Recipe,
    model: nn.Module,
    forward_context: Callable[[], AbstractContextManager[Any]],
    batch: Batch,
    measuring: Measuring,
) -> Loss:
    """The loss of a batch, which the metrics are updated with."""
    with forward_context():
        made = _transformed(recipe, batch)
        loss = loss_of(recipe.loss, model, made)
    refuse_unusable_loss(recipe, loss)
    measuring.update(loss, batch | made)
    return loss


def refuse_unusable_loss(recipe: Recipe, loss: Loss) -> None:
    """Raise ConfigError for a sum that is no fp32 scalar: the backward pass would refuse it later."""
    if loss.sum.ndim == 0 and loss.sum.dtype == torch.float32:
        return
    at = defined_at(recipe.loss)
    raise ConfigError(
        f"the recipe's loss{f' at {at}' if at else ''} returned Loss(sum, ...) with a sum of "
        f"{str(loss.sum.dtype).removeprefix('torch.')} {list(loss.sum.shape)}: it must be one number in "
        'float32, over the samples. Sum with .sum() or reduction="sum", and compute from network(x).float().'
    )


def refuse_no_loss(count: float, num_samples: int) -> None:
    """Raise DataError if the counts of the losses of a whole set add up to nothing: there is no mean."""
    if not count > 0:
        raise DataError(
            f"none of the {num_samples} samples to evaluate on carries loss: the counts of Loss(sum, count) "
            f"add up to {count:g}. Check what the loss counts, and that the samples can be read."
        )


def check_every_sample_once(seen: Tensor, world_size: int) -> None:
    """Assert it. seen: int64 [samples], how often each sample was evaluated over all ranks."""
    missed, repeated = int((seen == 0).sum()), int((seen > 1).sum())
    if missed or repeated:
        raise AssertionError(
            f"evaluation on {world_size} ranks missed {missed} and repeated {repeated} of {len(seen)} "
            f"samples. Each must be evaluated exactly once: this is a bug of the launcher."
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in the context. Restores the mode of each module, also after an error."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _transformed(recipe: Recipe, batch: Batch) -> Batch:
    transform = recipe.eval_transform
    return batch if transform is None else transformed("eval_transform", transform, batch)
