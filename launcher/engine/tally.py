"""What travels with each step beside the gradients: samples, the sum of their losses, bad losses, votes.

Owns the one small collective of a step. It is launched before the first bucket, on every rank, so the order
of collectives is the same everywhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

VOTES = 4  # questions on which the ranks may vote in a step; what they mean is the caller's business


class Tally:
    """Sums over the micro-batches of this rank, then over the ranks: one fp64 tensor [3 + VOTES]."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._sums = torch.zeros(3 + VOTES, dtype=torch.float64, device=device)
        self._work: dist.Work | None = None
        self.sent = False

    def add(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """A micro-batch of `count` samples whose losses sum to `loss_sum`."""
        loss = loss_sum.detach().double()
        n = count.to(loss) if isinstance(count, Tensor) else torch.full_like(loss, float(count))
        self._sums[:3] += torch.stack([n, loss, (~loss.isfinite()).double()])

    def vote(self, question: int) -> None:
        """Count this rank among those in favour."""
        assert not self.sent, "the votes of this step are on their way"
        self._sums[3 + question] = 1

    def send(self) -> None:
        """Start summing over the ranks. Once per step."""
        self.sent = True
        if self._group is not None:
            self._work = dist.all_reduce(self._sums, group=self._group, async_op=True)

    def totals(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of all ranks: samples, sum of losses, micro-batches with a bad loss, all 0-dim; votes [VOTES]."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        sums = self._sums.clone()
        return sums[0], sums[1], sums[2], sums[3:]

    def restart(self) -> None:
        """Begin the next step."""
        self._sums.zero_()
        self.sent = False
