"""Which samples a rank trains on: a pure function of (seed, epoch, step), split over the ranks.

Owns the order of an epoch, its division into global batches, rank shares and micro-batches, the random
numbers for augmentation, and data sets on the device. Never reads files and never communicates: every rank
computes the same order and takes its share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.errors import DataError

Batch = dict[str, Tensor]  # columns by name, each [n, ...]: the samples of a micro-batch

NOISE_COLUMNS = 4  # random numbers per sample and epoch; a transform takes as many as it needs


@dataclass(frozen=True)
class TensorData:
    """A set of samples in memory: named columns [num_samples, ...], one row per sample.

    Raises DataError for columns of different lengths. `name` is the config's `data.name` for a built-in data
    set, None for any other.
    """

    columns: dict[str, Tensor]
    name: str | None = None

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"all columns of a data set must have the same number of samples, got {lengths}.")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def to(self, device: torch.device) -> TensorData:
        """The same samples on `device`."""
        return TensorData({name: column.to(device) for name, column in self.columns.items()}, self.name)

    def select(self, indices: Tensor) -> Batch:
        """The rows at `indices` (int64, on the columns' device), as new tensors."""
        return {name: column.index_select(0, indices) for name, column in self.columns.items()}


def generator_for(*key: int | str) -> torch.Generator:
    """A CPU generator whose stream depends on `key` only, not on the process, platform or earlier draws.

    The key is hashed, because torch keeps 32 bits of a CPU generator's seed.
    """
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the samples: int64 [num_samples], a permutation."""
    return torch.randperm(num_samples, generator=generator_for("order", seed, epoch))


def epoch_noise(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Uniform random numbers in [0, 1) for each position of the epoch's order: fp32 [num_samples, 4]."""
    return torch.rand(num_samples, NOISE_COLUMNS, generator=generator_for("noise", seed, epoch))


def share_of(positions: range, part: int, parts: int) -> range:
    """One of the consecutive parts of `positions`, for instance a rank's; lengths differ by at most one."""
    return positions[part * len(positions) // parts : (part + 1) * len(positions) // parts]


def cut(positions: range, size: int) -> list[range]:
    """`positions` in the fewest consecutive pieces of at most `size`, none empty.

    Lengths differ by at most one: BatchNorm has no variance on a remainder of a single sample.
    """
    pieces = -(-len(positions) // size)
    return [share_of(positions, piece, pieces) for piece in range(pieces)]


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch's positions are divided: into global batches, ranks' shares, micro-batches."""

    num_samples: int
    batch_size: int  # over all ranks
    micro_batch: int | None  # per rank and forward; None: the whole share at once
    world_size: int
    rank: int
    seed: int
    drop_last: bool

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("the training set is empty. Check data.path.")

    @property
    def steps_per_epoch(self) -> int:
        """At least one: a set smaller than a batch is one step of all its samples, even with drop_last."""
        full_batches, rest = divmod(self.num_samples, self.batch_size)
        return max(1, full_batches) if self.drop_last or rest == 0 else full_batches + 1

    @property
    def micro_batches(self) -> int:
        """The largest number of micro-batches that any rank has in any step: the same on all ranks."""
        largest_batch = min(self.batch_size, self.num_samples)
        largest_share = -(-largest_batch // self.world_size)
        return -(-largest_share // self.micro_batch) if self.micro_batch else 1

    def global_batch(self, step: int) -> range:
        """Positions in the epoch's order that step `step` of the epoch trains on, over all ranks."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} of an epoch of {self.steps_per_epoch} steps")
        return range(step * self.batch_size, min((step + 1) * self.batch_size, self.num_samples))

    def micro_positions(self, step: int) -> list[range]:
        """This rank's positions in `step`, one range per micro-batch; none where its share is empty."""
        share = share_of(self.global_batch(step), self.rank, self.world_size)
        return cut(share, self.micro_batch or max(1, len(share)))


@dataclass(frozen=True)
class _Epoch:
    number: int
    order: Tensor  # int64 [num_samples], on the device
    noise: Tensor  # fp32 [num_samples, 4], on the device


class DeviceBatches:
    """Batches of a data set on the device, gathered and transformed there.

    Holds the order and the noise of one epoch, so that a step copies nothing between host and device.
    """

    def __init__(
        self, data: TensorData, plan: BatchPlan, transform: Callable[[Batch, Tensor], Batch] | None
    ) -> None:
        self.plan = plan
        self._data = data
        self._transform = transform
        self._epoch: _Epoch | None = None

    def step(self, epoch: int, step: int) -> list[Batch]:
        """This rank's micro-batches. A sample's noise depends only on its position in the epoch."""
        current = self._enter(epoch)
        return [
            self._batch(
                current.order[positions.start : positions.stop],
                current.noise[positions.start : positions.stop],
            )
            for positions in self.plan.micro_positions(step)
        ]

    def _batch(self, indices: Tensor, noise: Tensor) -> Batch:
        batch = self._data.select(indices)
        if self._transform is None:
            return batch
        return transformed("train_transform", self._transform, batch, noise)

    def _enter(self, epoch: int) -> _Epoch:
        if self._epoch is None or self._epoch.number != epoch:
            device = next(iter(self._data.columns.values())).device
            size, seed = self.plan.num_samples, self.plan.seed
            order, noise = epoch_order(size, seed, epoch), epoch_noise(size, seed, epoch)
            self._epoch = _Epoch(epoch, _move(order, device), _move(noise, device))
        return self._epoch


def transformed(name: str, transform: Callable[..., Batch], batch: Batch, *more: Tensor) -> Batch:
    """Apply a transform. Raises DataError where a column of the batch changes its number of samples.

    Columns that the transform adds may have any shape.
    """
    given = {column: len(rows) for column, rows in batch.items()}  # first: it may change the batch in place
    made = transform(batch, *more)
    for column in [column for column in given if column in made]:
        shape = list(made[column].shape)
        if shape[:1] != [given[column]]:
            raise DataError(
                f"the recipe's {name} was given {given[column]} samples and returned the column {column} "
                f"in the shape {shape}. It must return as many samples: leave some out in the recipe's "
                "TensorData."
            )
    return made


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without making the host wait for queued work."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def evaluation_batches(
    data: TensorData, rank: int, world_size: int, batch_size: int
) -> Iterator[tuple[Tensor, Batch]]:
    """This rank's samples in order, as (indices int64 [n], batch). Over all ranks, every sample occurs once.

    The columns are views of the data, not copies.
    """
    device = next(iter(data.columns.values())).device
    for piece in cut(share_of(range(len(data)), rank, world_size), batch_size):
        indices = torch.arange(piece.start, piece.stop, device=device)
        yield indices, {name: column[piece.start : piece.stop] for name, column in data.columns.items()}
