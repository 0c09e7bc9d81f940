"""Which samples a rank trains on: a pure function of (seed, epoch, step), split over the ranks.

Owns the order of an epoch and its division into global batches, shares and micro-batches. Never reads a
sample, never communicates: every rank computes the same order and takes its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from launcher.data.seeding import derive_seed
from launcher.errors import DataError

WINDOW = 100  # batches among which samples of similar length find each other


def generator_for(*key: int | str) -> torch.Generator:
    """A CPU generator whose stream depends on `key` only, not on the process, platform or earlier draws.

    The key is hashed, because torch keeps 32 bits of a CPU generator's seed.
    """
    return torch.Generator().manual_seed(derive_seed(*key) % 2**32)


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the samples: int64 [num_samples], a permutation."""
    return torch.randperm(num_samples, generator=generator_for("order", seed, epoch))


def group_by_length(order: Tensor, lengths: Tensor, batch_size: int, seed: int, epoch: int) -> Tensor:
    """`order` with samples of similar length in one batch, so that little is padded: int64 [num_samples].

    lengths: [num_samples], by index. Sorts within windows of 100 batches, then shuffles the batches of a
    window, and the samples of each batch so that no rank gets the long ones. A smaller last batch stays last.
    """
    generator = generator_for("by length", seed, epoch)
    parts = []
    for window in torch.split(order, WINDOW * batch_size):
        rest = len(window) % batch_size
        last, whole = window[:rest], window[rest:]  # of a random order: the rest is not of one length
        batches = whole[torch.argsort(lengths[whole], stable=True)].view(-1, batch_size)
        batches = batches[torch.randperm(len(batches), generator=generator)]
        within = torch.rand(batches.shape, generator=generator).argsort(dim=1)
        parts += [batches.gather(1, within).flatten(), last]
    return torch.cat(parts)


def rank_slice(positions: range, part: int, parts: int) -> range:
    """One of the consecutive parts of `positions`, for instance a rank's; lengths differ by at most one."""
    return positions[part * len(positions) // parts : (part + 1) * len(positions) // parts]


def rank_part(positions: range, rank: int, world_size: int, shares: Sequence[int] = ()) -> range:
    """A rank's consecutive part of `positions`, in proportion to its share, within one sample.

    Without shares, the ranks have parts of equal size: those of `rank_slice`.
    """
    if not shares:
        return rank_slice(positions, rank, world_size)
    before, total = sum(shares[:rank]), sum(shares)
    return positions[before * len(positions) // total : (before + shares[rank]) * len(positions) // total]


def cut(positions: range, size: int) -> list[range]:
    """`positions` in the fewest consecutive pieces of at most `size`, none empty.

    Lengths differ by at most one: BatchNorm has no variance on a remainder of a single sample.
    """
    pieces = -(-len(positions) // size)
    return [rank_slice(positions, piece, pieces) for piece in range(pieces)]


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch's positions are divided: into global batches, ranks' shares, micro-batches."""

    num_samples: int
    batch_size: int  # over all ranks
    micro_batch: int | None  # per rank and forward; None: an equal share of the batch
    world_size: int
    rank: int
    seed: int
    drop_last: bool
    lengths: Tensor | None = field(default=None, compare=False)  # of each sample; None: they do not matter
    shares: tuple[int, ...] = ()  # samples of each rank in a whole batch; (): equally many

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(
                "the training set is empty: it must have at least one sample. Check what the recipe makes it "
                "of: the files that data.path names, or its own code."
            )

    @cached_property  # read several times in each step
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, at least one: a set smaller than a batch is one step, even with drop_last."""
        full_batches, rest = divmod(self.num_samples, self.batch_size)
        return max(1, full_batches) if self.drop_last or rest == 0 else full_batches + 1

    @property
    def _equal_share(self) -> int:
        """The largest number of samples that a rank has of a batch that is divided equally."""
        return -(-min(self.batch_size, self.num_samples) // self.world_size)

    @property
    def largest_shares(self) -> list[int]:
        """The largest number of samples that each rank has in any step."""
        of_rest = -(-(self.num_samples % self.batch_size) // self.world_size)
        if self.num_samples < self.batch_size or not self.shares:
            return [self._equal_share] * self.world_size
        return [max(share, of_rest) for share in self.shares]

    @property
    def largest_share(self) -> int:
        """The largest number of samples that any rank has in any step: the same on all ranks."""
        return max(self.largest_shares)

    @property
    def most_per_pass(self) -> int:
        """The number of samples that a micro-batch may have.

        Without `micro_batch` that of an equal share: a larger share takes more passes, whose gradients are
        summed in fp32, and no larger activations.
        """
        return self.micro_batch or self._equal_share

    @property
    def micro_batches_by_rank(self) -> list[int]:
        """The largest number of micro-batches that each rank has in any step."""
        return [-(-share // self.most_per_pass) for share in self.largest_shares]

    @property
    def own_micro_batches(self) -> int:
        """The largest number of micro-batches that this rank has in any step."""
        return self.micro_batches_by_rank[self.rank]

    @property
    def micro_batches(self) -> int:
        """The largest number of micro-batches that any rank has in any step: the same on all ranks."""
        return max(self.micro_batches_by_rank)

    @property
    def largest_micro_batch(self) -> int:
        """The largest number of samples in a micro-batch of a whole batch, on any rank.

        At most `micro_batch`: a share of 10 is cut into 5 and 5 where 8 would be allowed.
        """
        shares = zip(self.largest_shares, self.micro_batches_by_rank, strict=True)
        return max(-(-share // passes) for share, passes in shares)

    def longest_step(self, epoch: int) -> int:
        """The step of `epoch` with the longest sample; the first where lengths are not known."""
        if self.lengths is None:
            return 0
        longest = int(self.lengths[self.order(epoch)].argmax())
        return min(longest // self.batch_size, self.steps_per_epoch - 1)

    def order(self, epoch: int) -> Tensor:
        """The indices of the samples in the order in which `epoch` visits them: int64 [num_samples]."""
        order = epoch_order(self.num_samples, self.seed, epoch)
        if self.lengths is None:
            return order
        return group_by_length(order, self.lengths, self.batch_size, self.seed, epoch)

    def sample_indices(self, epoch: int, step: int) -> list[list[int]]:
        """The indices of this rank's samples in `step` of `epoch`, one list per micro-batch."""
        order = self.order(epoch)
        return [order[part.start : part.stop].tolist() for part in self.micro_positions(step)]

    def global_batch(self, step: int) -> range:
        """Positions in the epoch's order that step `step` of the epoch trains on, over all ranks."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} of an epoch of {self.steps_per_epoch} steps")
        return range(step * self.batch_size, min((step + 1) * self.batch_size, self.num_samples))

    def samples_of(self, step: int) -> int:
        """The number of samples of `global_batch`, without its check: asked for in every step."""
        return min(self.batch_size, self.num_samples - step * self.batch_size)

    def micro_positions(self, step: int) -> list[range]:
        """This rank's positions in `step`, one range per micro-batch; none where its share is empty.

        The smaller last batch of an epoch is divided equally: a small share of it might be a single sample,
        in which BatchNorm finds no variance.
        """
        batch = self.global_batch(step)
        shares = self.shares if len(batch) == self.batch_size else ()
        return cut(rank_part(batch, self.rank, self.world_size, shares), self.most_per_pass)
