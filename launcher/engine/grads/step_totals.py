"""What the ranks add up in each step beside the gradients: one small fp64 all-reduce at its end.

Owns that message. It is sent after the last bucket has been reduced and read, and has counts, losses, votes,
one status per rank, and the sums of squares of the reduced gradient. Where all ranks hold the same gradient,
each gives its own sum divided by their number: on unlike GPUs or numbers of threads those differ in their
last bits, and the sum over the ranks does not. So the verdict, the norm and the clip factor are the same bits
on all ranks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.async_work as async_work
from launcher.engine.limits import VOTES
from launcher.engine.precision.found_inf import StepTotals

# The message: samples, sum of losses, non-finite losses; the votes; the sum of squares; the status by rank;
# the sums of squares by parameter.
VOTES_AT = 3
SQUARES_AT = VOTES_AT + VOTES
STATUS_AT = SQUARES_AT + 1


class Message(NamedTuple):
    """What a rank adds to the totals of a step.

    With a group `head` and `squares` are views of `sent`, so that they are the sums over the ranks once it
    has been all-reduced. One process sends nothing.
    """

    head: Any  # fp64 [STATUS_AT + ranks], or a list where the host decides alone
    squares: Tensor  # fp64 [parameters]
    sent: Tensor | None = None


class TotalsReducer:
    """Collects this rank's numbers during a step, and adds them up over the ranks at its end.

    `sharded`: bool [parameters], those of which each rank holds a part of the reduced gradient, not all.
    """

    def __init__(
        self, on_host: bool, device: torch.device, group: async_work.Group, sharded: list[bool]
    ) -> None:
        self._on_host, self._device, self._group = on_host, device, group
        self._world_size = dist.get_world_size(group) if group else 1
        # Each rank gives a part of the sum: its shard, or of a gradient that all hold a W-th of its own sum.
        shares = [1.0 if each else 1.0 / self._world_size for each in sharded]
        self._shares = torch.tensor(shares, dtype=torch.float64).to(device)
        self._rank = dist.get_rank(group) if group else 0
        # On the device, prepared once: a step launches fewer kernels. [ranks]: 1 for this one
        self._own_slot = (torch.arange(self._world_size) == self._rank).double().to(device)
        self._no_votes = torch.zeros(VOTES, dtype=torch.float64, device=device)
        self._num_head = STATUS_AT + self._world_size  # numbers before the sums of squares by parameter
        self.restart()

    def restart(self) -> None:
        """Begin the next step."""
        self._losses: list[Any] = []  # of micro-batches
        self._counts: list[Any] = []
        self._votes = [0.0] * VOTES

    def add(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """A micro-batch of `count` samples whose losses sum to `loss_sum`."""
        if self._on_host:
            self._losses.append(loss_sum.item())
            self._counts.append(float(count))
        else:
            self._losses.append(loss_sum.detach().view(()))
            if isinstance(count, Tensor):  # in fp64: uint8 would wrap in the sum, fp16 would overflow
                self._counts.append(count.detach().to(self._device, torch.float64).view(()))
            else:
                self._counts.append(float(count))

    def vote(self, question: int, votes: float) -> None:
        """Record this rank's votes for `question`."""
        self._votes[question] = float(votes)

    def message(self, squares: Tensor, status: Tensor | int) -> Message:
        """This rank's part. `squares` [parameters] are of the reduced gradient as this rank holds it.

        `status` is 0-dim where the device decides.
        """
        by_parameter = squares if self._group is None else squares * self._shares
        # Summed before the exchange: sums over parameters may differ between unlike processors.
        total = by_parameter.sum()
        head = self._head_on_host(total, status) if self._on_host else self._head_on_device(total, status)
        if self._group is None:
            return Message(head, by_parameter)
        sent = torch.cat([torch.as_tensor(head, dtype=torch.float64), by_parameter])
        return Message(sent[: self._num_head], sent[self._num_head :], sent)

    def reduce(self, message: Message) -> StepTotals:
        """Add up the ranks' messages. A collective of each step, beside its buckets."""
        numbers = message.head
        if message.sent is not None:
            async_work.all_reduce(message.sent, self._group)
            numbers = numbers.tolist() if self._on_host else numbers
        status = numbers[STATUS_AT:]
        return StepTotals(
            samples=numbers[0],
            loss_sum=numbers[1],
            bad_losses=numbers[2],
            squares=numbers[SQUARES_AT],
            worst_status=max(status) if self._on_host else status.max(),
            votes=numbers[VOTES_AT:SQUARES_AT],
            status=status,
            squares_by_parameter=message.squares,
        )

    def _head_on_host(self, total: Tensor, status: Tensor | int) -> list[float]:
        bad = sum(not math.isfinite(loss) for loss in self._losses)
        by_rank = [0.0] * self._world_size
        by_rank[self._rank] = float(status)
        return [sum(self._counts), sum(self._losses), bad, *self._votes, float(total), *by_rank]

    def _head_on_device(self, total: Tensor, status: Tensor | int) -> Tensor:
        """The same without waiting: numbers of the host are written by kernels, not uploaded."""

        def filled(number: float) -> Tensor:
            return torch.full((1,), number, dtype=torch.float64, device=self._device)

        parts = [filled(0.0)] * 3
        if self._losses:
            losses, samples = torch.stack(self._losses), sum(self._counts)
            parts = [
                samples.view(1) if isinstance(samples, Tensor) else filled(samples),
                losses.sum(dtype=torch.float64).view(1),
                # x - x is nan where x is inf or nan: two kernels, of which isfinite() takes four.
                ((losses - losses) != 0).sum(dtype=torch.float64).view(1),
            ]
        votes = self._no_votes.clone() if any(self._votes) else self._no_votes
        for question, number in enumerate(self._votes):
            if number:
                votes[question] = number
        return torch.cat([*parts, votes, total.view(1), self._own_slot * status])
