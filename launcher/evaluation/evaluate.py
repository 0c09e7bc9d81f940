"""Exact evaluation on any number of ranks.

Owns the pass over a set in which every sample counts exactly once; what is measured is in `measuring`.
Communicates only after the pass: ranks may have unequal shares, or none. Never changes the model: all ranks
need the same weights and buffers before they come here, and the model leaves in the mode in which it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from launcher.data.sources import Readable, evaluation_batches
from launcher.data.streamed import StreamData
from launcher.data.tensors import Batch, transformed
from launcher.distributed.collectives import reduce
from launcher.distributed.process_group import WorkerEnv
from launcher.errors import DataError
from launcher.evaluation.confusion import Confusion
from launcher.evaluation.measuring import Guard, Measuring, rows_with_nan, unguarded
from launcher.recipe import Loss, Recipe, loss_of


@dataclass(frozen=True)
class Evaluation:
    """The result over a whole set, the same on all ranks."""

    loss: float  # mean over all samples (or tokens)
    samples: int  # that were measured
    metrics: dict[str, float]
    higher_is_better: dict[str, bool | None]  # by metric; None: the metric does not say
    nan_outputs: int = 0  # samples with a NaN among the outputs that metrics read
    unreadable: int = 0  # samples that were left out
    confusion: Confusion | None = None  # where classes were measured; on rank 0 only


class Interrupted(Exception):
    """Some rank broke the evaluation off, so there is none. Raised on all ranks alike."""


@dataclass(frozen=True)
class _Tally:
    """What a rank has found out so far; adding the tallies of all ranks gives the whole."""

    loss_sum: Tensor  # fp64 [1]
    # int64 [5 + samples]: loss count, broken off, NaN outputs, samples, unreadable; times each was seen
    integers: Tensor

    @classmethod
    def empty(cls, num_samples: int, device: torch.device) -> _Tally:
        return cls(
            torch.zeros(1, dtype=torch.float64, device=device),
            torch.zeros(5 + num_samples, dtype=torch.int64, device=device),
        )

    @property
    def broken_off(self) -> Tensor:
        return self.integers[1]

    @property
    def nan_outputs(self) -> Tensor:
        return self.integers[2]

    @property
    def seen(self) -> Tensor:
        return self.integers[5:]

    def see(self, indices: Tensor, unreadable: bool = False) -> None:
        """Count samples; of a set whose size is known each by itself. indices: int64 [n]."""
        self.integers[3] += len(indices)
        self.integers[4] += len(indices) if unreadable else 0
        if len(self.seen):
            self.seen.index_add_(0, indices, torch.ones_like(indices))

    def totals(self) -> Totals:
        """The sums over all ranks. Waits for the device."""
        count, _, nan_outputs, samples, unreadable = self.integers[:5].tolist()
        return Totals(self.loss_sum.item(), count, nan_outputs, samples - unreadable, unreadable)


class Totals(NamedTuple):
    """What an evaluation has counted."""

    loss_sum: float
    counted: int  # samples or tokens that carry loss
    nan_outputs: int
    samples: int  # that were measured
    unreadable: int


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
) -> Evaluation:
    """Measures the model on `data` (on the device, whole on every rank). Every rank has to call this.

    `guard` surrounds each call of a metric; `beat` is called between the batches that rank 0 is sent.
    Raises Interrupted, on all ranks, where `interrupted` was true before a batch on any of them.
    """
    tally = _Tally.empty(0 if isinstance(data, StreamData) else len(data), env.device)
    measuring = Measuring(recipe, env, guard, beat)
    with evaluating(model), torch.no_grad():
        for indices, batch in evaluation_batches(data, env.rank, env.world_size, batch_size):
            if interrupted():
                tally.broken_off.fill_(1)
                break
            if batch is None:  # samples that could not be read and may be left out
                tally.see(indices, unreadable=True)
                continue
            with forward_context():
                made = _transformed(recipe, batch)
                loss = _add(tally, recipe, model, indices, made)
            measuring.update(loss, batch | made)
            tally.nan_outputs.add_(rows_with_nan(loss.outputs))
        reduce(tally.integers, env.group)
        reduce(tally.loss_sum, env.group)
        if tally.broken_off:
            raise Interrupted
        check_every_sample_once(tally.seen, env.world_size)
        totals = tally.totals()
        refuse_no_loss(totals.counted, totals.samples)
        found = measuring.conclude(totals.loss_sum, totals.counted)
    return Evaluation(
        totals.loss_sum / totals.counted,
        totals.samples,
        found.values,
        found.higher_is_better,
        totals.nan_outputs,
        totals.unreadable,
        found.confusion,
    )


def refuse_no_loss(count: int, num_samples: int) -> None:
    """Raise DataError where the loss of a whole set has counted nothing: it has no mean."""
    if count < 1:
        raise DataError(
            f"none of the {num_samples} samples to evaluate on carries loss: the counts of Loss(sum, count) "
            f"add up to {count}. Check what the loss counts, and that the samples can be read."
        )


def check_every_sample_once(seen: Tensor, world_size: int) -> None:
    """seen: int64 [samples], how often each sample was evaluated over all ranks."""
    missed, repeated = int((seen == 0).sum()), int((seen > 1).sum())
    if missed or repeated:
        raise AssertionError(
            f"evaluation on {world_size} ranks missed {missed} and repeated {repeated} of {len(seen)} "
            f"samples. Each has to be evaluated exactly once: this is a bug of the launcher."
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is in its own mode again, also after an error."""
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


def _add(tally: _Tally, recipe: Recipe, model: nn.Module, indices: Tensor, batch: Batch) -> Loss:
    """The loss of a batch, counted."""
    loss = loss_of(recipe.loss, model, batch)
    tally.loss_sum.add_(loss.sum)
    tally.integers[0] += loss.count
    tally.see(indices)
    return loss
