"""The kinds of sets that a recipe may give, and one way to read each of them.

Owns the choice by kind. What a set is made of is in `tensors` and `loader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader

from launcher.data.batch_plan import BatchPlan
from launcher.data.loader import IndexedData, LoadedBatches, Loading
from launcher.data.reader import Collate
from launcher.data.tensors import Batch, DeviceBatches, TensorData, tensor_batches
from launcher.errors import DataError

Readable = TensorData | IndexedData


class Batches(Protocol):
    """The training batches of a rank."""

    plan: BatchPlan

    def step(self, epoch: int, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, on the device. The same whenever it is asked for."""

    def latest_indices(self) -> list[list[int]]:
        """The indices in the set of the samples that the latest `step` returned, one list per micro-batch."""

    def take_bad(self) -> int:
        """How many samples were left out since the last call, because they could not be read."""


def readable(data: Any, collate: Collate | None, how: Loading, kind: str) -> Readable:
    """A recipe's set as one that batches can be made of: on the device, or read by loader processes.

    Raises DataError for what is neither. `kind` is "training" or "validation", for messages.
    """
    if isinstance(data, TensorData):
        return data.to(how.device)
    if isinstance(data, DataLoader):
        raise DataError(
            f"the recipe's {kind} set is a DataLoader. Give the data set itself (loader.dataset), and its "
            "collate_fn as Recipe.collate: the launcher makes the loader, with data.workers processes, so "
            "that all ranks and every resume see the same order."
        )
    has = [name for name in ("__len__", "__getitem__") if hasattr(data, name)]
    if len(has) < 2:
        lacks = " and ".join(name for name in ("__len__", "__getitem__") if name not in has)
        raise DataError(
            f"the recipe's {kind} set is a {type(data).__name__}, which has no {lacks}. Give TensorData, or "
            "a map-style data set: its number of samples is known, and they can be read in any order."
        )
    return IndexedData(data, collate, how, kind)


def training_batches(
    data: Readable, plan: BatchPlan, transform: Callable[[Batch, Tensor], Batch] | None, total_steps: int
) -> Batches:
    """The batches of `plan`. `total_steps` is the length of the run: nothing is read ahead beyond it."""
    if isinstance(data, TensorData):
        return DeviceBatches(data, plan, transform)
    return LoadedBatches(data, plan, transform, total_steps)


def evaluation_batches(
    data: Readable, rank: int, world_size: int, batch_size: int
) -> Iterator[tuple[Tensor, Batch | None]]:
    """This rank's samples in order, as (indices int64 [n], batch): over all ranks every sample once.

    The batch is None for samples that could not be read and may be left out.
    """
    if isinstance(data, TensorData):
        return tensor_batches(data, rank, world_size, batch_size)
    return data.evaluation_batches(rank, world_size, batch_size)
