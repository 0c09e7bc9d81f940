"""Sets of samples that lie on the device, and their batches: gathered and transformed there.

Never reads files, moves nothing between host and device within an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from launcher.data.batch_plan import BatchPlan, cut, rank_part
from launcher.data.seeding import seed_transform
from launcher.errors import DataError, counted

_streams: dict[torch.device, torch.cuda.Stream] = {}

Batch = dict[str, Tensor]  # columns by name, each [n, ...]: the samples of a micro-batch
Transform = Callable[[Batch], Batch]  # of a batch on the device

COLUMNS = "it takes {name: tensor}, one row per sample; torch.as_tensor(x) makes tensors of arrays and lists"


@dataclass(frozen=True)
class TensorData:
    """A set of samples in memory: named columns [num_samples, ...], one row per sample.

    Raises DataError for columns that are no tensors or differ in length. `name` is the
    config's `data.name` for a built-in data set, None for any other.
    """

    columns: dict[str, Tensor]
    name: str | None = None

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if not isinstance(column, Tensor) or not column.ndim:
                kind = "one number" if isinstance(column, Tensor) else f"a {type(column).__name__}"
                raise DataError(f"the column {name} of TensorData is {kind}: {COLUMNS}.")
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(
                f"all columns of a data set must have the same number of rows, got {lengths}. Samples are "
                "counted by the first dimension."
            )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def to(self, device: torch.device) -> TensorData:
        """The same samples on `device`."""
        return replace(self, columns={name: column.to(device) for name, column in self.columns.items()})

    def select(self, indices: Tensor) -> Batch:
        """The rows at `indices` (int64, on the columns' device), as new tensors."""
        return {name: column.index_select(0, indices) for name, column in self.columns.items()}

    def evaluation_batches(
        self, rank: int, world_size: int, batch_size: int, shares: Sequence[int] = ()
    ) -> Iterator[tuple[int, Batch]]:
        """This rank's samples in order, as (how many, batch). Over all ranks, every sample occurs once.

        `shares` are those of `BatchPlan`. The columns are copies: an eval_transform or a loss may write into
        them.
        """
        for piece in cut(rank_part(range(len(self)), rank, world_size, shares), batch_size):
            part = slice(piece.start, piece.stop)
            yield len(piece), {name: column[part].clone() for name, column in self.columns.items()}

    def first_batch(self, rank: int, world_size: int, batch_size: int, most: int) -> Batch | None:
        """At most `most` samples of the first of `evaluation_batches`; None where this rank has no sample."""
        for _, batch in self.evaluation_batches(rank, world_size, batch_size):
            return {name: column[:most] for name, column in batch.items()}
        return None


class Batches(Protocol):
    """The training batches of a rank. What not all kinds of data have is absent unless a class defines it."""

    plan: BatchPlan

    def step(self, epoch: int, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, on the device. The same whenever it is asked for."""

    def divide(self, plan: BatchPlan) -> None:
        """Take the coming steps from `plan`, which gives the ranks other shares. Not of a stream."""
        self.plan = plan

    def trial(self, step: int, most: int) -> list[Batch]:
        """Micro-batches of a step of the first epoch, read in this process; beyond `most` they need not be.

        The order of the run is not touched.
        """
        return self.step(0, step)

    def latest_indices(self) -> list[list[int]]:
        """The indices in the set of the samples that the latest `step` returned, one list per micro-batch."""

    def latest_bad(self) -> int:
        """How many samples the latest `step` has left out, because they could not be read."""
        return 0

    def missing(self) -> int:
        """How many samples of its share this rank lacks in the latest step. Only where a stream ends."""
        return 0

    def exhausted(self) -> bool:
        """Whether this rank has nothing left before the data starts again. Only of a stream."""
        return False

    def restart_epoch(self) -> None:
        """Start the data again, on all ranks after the same step. Only of a stream."""
        return

    def position(self) -> str:
        """Where this rank stands in a stream, for a resume; empty for data that needs no position."""
        return ""


@dataclass(eq=False)
class DeviceBatches(Batches):
    """Batches of a data set on the device, gathered and transformed there.

    Holds the order of one epoch, so that a step copies nothing between host and device.
    """

    data: TensorData
    plan: BatchPlan
    transform: Transform | None

    def __post_init__(self) -> None:
        self._latest = -1, 0  # epoch and step

    def step(self, epoch: int, step: int) -> list[Batch]:
        """This rank's micro-batches."""
        if epoch != self._latest[0]:
            device = next(iter(self.data.columns.values())).device
            self._order = to_device(self.plan.order(epoch), device)  # int64 [num_samples]
        self._latest = epoch, step
        return [self._batch(epoch, part) for part in self.plan.micro_positions(step)]

    def _batch(self, epoch: int, part: range) -> Batch:
        """The samples at these positions of the epoch's order, gathered and transformed on the device."""
        batch = self.data.select(self._order[part.start : part.stop])
        if self.transform is None:
            return batch
        seed_transform(self.plan.seed, epoch, part.start, self._order.device)
        return transformed("train_transform", self.transform, batch)

    def latest_indices(self) -> list[list[int]]:
        """The indices of the samples that the latest `step` returned, one list per micro-batch."""
        return self.plan.sample_indices(*self._latest)


def transformed(name: str, transform: Transform | None, batch: Batch) -> Batch:
    """Apply a transform, if there is one.

    Raises DataError where a column of the batch changes its number of samples. Columns that the transform
    adds may have any shape.
    """
    if transform is None:
        return batch
    given = {column: len(rows) for column, rows in batch.items()}  # first: it may change the batch in place
    made = transform(batch)
    for column in [column for column in given if column in made]:
        shape = list(made[column].shape)
        if shape[:1] != [given[column]]:
            raise DataError(
                f"the recipe's {name} was given {counted(given[column], 'sample')} and returned the column "
                f"{column} in the shape {shape}. It must return as many: leave some out in the recipe's "
                "TensorData."
            )
    return made


def batch_to_device(batch: Batch, device: torch.device) -> Batch:
    """The columns of a batch on the CPU, each by `to_device`."""
    return batch if device.type == "cpu" else {name: to_device(each, device) for name, each in batch.items()}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy on a separate stream, so that the copy does not wait for what the device is still computing."""
    if device.type != "cuda":
        return tensor.to(device)
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = _streams[device]
    with torch.cuda.stream(stream):
        # From memory that is not pinned the copy would make the host wait.
        moved = tensor.pin_memory().to(device, non_blocking=True)
    current = torch.cuda.current_stream(device)
    current.wait_stream(stream)
    # It was allocated on the other stream: its memory may be reused only after this one has read it.
    moved.record_stream(current)
    return moved
