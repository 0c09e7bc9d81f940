"""What the ranks add up in each step beside the gradients: one small fp64 all-reduce at its end.

Owns that message. It is sent after the last bucket has been reduced and read, and has counts, losses, votes,
one status per rank, and the sums of squares of the reduced gradient. Where all ranks hold the same gradient,
each gives its own sum divided by their number: on unlike GPUs or numbers of threads those differ in their
last bits, and the sum over the ranks does not. So the verdict, the norm and the clip factor are the same bits
on all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.works as works
from launcher.engine.limits import VOTES
from launcher.engine.precision.found_inf import StepTotals

COUNTS = 3 + VOTES + 1  # samples, sum of losses, non-finite losses, the votes, sum of squares


class TotalsReducer:
    """Collects this rank's numbers during a step, and adds them up over the ranks at its end.

    `sharded`: bool [parameters], those of which each rank holds a part of the reduced gradient, not all.
    """

    def __init__(self, on_host: bool, device: torch.device, group: works.Group, sharded: list[bool]) -> None:
        self._on_host, self._device, self._group = on_host, device, group
        # Sends nothing, and spares itself the tensors: 25 us of a step of 500 us of a tiny network.
        self._alone_on_host = on_host and group is None
        self._world_size = dist.get_world_size(group) if group else 1
        shares = [1.0 if each else 1.0 / self._world_size for each in sharded]
        self._shares = torch.tensor(shares, dtype=torch.float64).to(device)
        rank = dist.get_rank(group) if group else 0
        own = [float(rank == each) for each in range(self._world_size)]
        self._own_slot = torch.tensor(own, dtype=torch.float64).to(device)  # [ranks]: 1 for this one
        self._no_votes = torch.zeros(VOTES, dtype=torch.float64, device=device)
        self.restart()

    def restart(self) -> None:
        """Begin the next step."""
        self._losses: list[Any] = []  # of micro-batches
        self._counts: list[Any] = []
        self._votes = [0.0] * VOTES
        self._status: Any = 0

    def add(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """A micro-batch of `count` samples whose losses sum to `loss_sum`."""
        if self._on_host:
            self._losses.append(loss_sum.item())
            self._counts.append(float(count))
        else:
            self._losses.append(loss_sum.detach().view(()))
            self._counts.append(
                count.detach().to(self._device).view(()) if isinstance(count, Tensor) else float(count)
            )

    def vote(self, question: int, votes: float) -> None:
        """Record this rank's votes for `question`."""
        self._votes[question] = float(votes)

    def message(self, squares: Tensor, status: Tensor | int) -> Tensor:
        """This rank's part, fp64 [COUNTS + ranks + parameters].

        `squares` [parameters] are of the reduced gradient as this rank holds it; `status` is 0-dim where the
        device decides.
        """
        if self._alone_on_host:
            self._status = status
            return squares
        by_parameter = squares if self._group is None else squares * self._shares
        counts = self._counts_on_host() if self._on_host else self._counts_on_device()
        # The sum before the exchange: sums over parameters may differ between unlike processors.
        return torch.cat([counts, by_parameter.sum().view(1), self._own_slot * status, by_parameter])

    def reduce(self, message: Tensor) -> StepTotals:
        """Add up the ranks' messages. A collective: the only one of a step beside the buckets."""
        if self._alone_on_host:
            return self._totals_alone(message)
        works.all_reduce(message, self._group)
        counts, status, by_parameter = torch.split(message, [COUNTS, self._world_size, len(self._shares)])
        worst = status.max()
        numbers: list[Any] = counts.tolist() if self._on_host else list(counts.unbind())
        samples, loss_sum, bad_losses, *votes, total = numbers
        return StepTotals(
            samples=samples,
            loss_sum=loss_sum,
            bad_losses=bad_losses,
            squares=total,
            worst_status=worst.item() if self._on_host else worst,
            votes=votes if self._on_host else counts[3:-1],
            status=status,
            squares_by_parameter=by_parameter,
        )

    def _totals_alone(self, squares: Tensor) -> StepTotals:
        samples, loss_sum, bad_losses, *votes = self._numbers()
        return StepTotals(
            samples=samples,
            loss_sum=loss_sum,
            bad_losses=bad_losses,
            squares=squares.sum().item(),
            worst_status=self._status,
            votes=votes,
            status=self._own_slot * self._status,
            squares_by_parameter=squares,
        )

    def _numbers(self) -> list[float]:
        bad = sum(not math.isfinite(loss) for loss in self._losses)
        return [sum(self._counts), sum(self._losses), bad, *self._votes]

    def _counts_on_host(self) -> Tensor:
        return torch.tensor(self._numbers(), dtype=torch.float64)

    def _counts_on_device(self) -> Tensor:
        """The same without waiting: numbers of the host are written by kernels, not uploaded."""

        def filled(number: float) -> Tensor:
            return torch.full((1,), number, dtype=torch.float64, device=self._device)

        parts = [filled(0.0)] * 3
        if self._losses:
            losses, samples = torch.stack(self._losses), sum(self._counts)
            parts = [
                samples.double().view(1) if isinstance(samples, Tensor) else filled(samples),
                losses.sum(dtype=torch.float64).view(1),
                losses.isfinite().logical_not_().sum(dtype=torch.float64).view(1),
            ]
        votes = self._no_votes.clone() if any(self._votes) else self._no_votes
        for question, number in enumerate(self._votes):
            if number:
                votes[question] = number
        return torch.cat([*parts, votes])
