"""What travels with each step beside the gradients: how many samples, the sum of their losses, bad losses.

Owns the one small collective of a step. It is launched before the first bucket, on every rank, so the order
of collectives is the same everywhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Tally:
    """Sums over the micro-batches of this rank, then over the ranks: one fp64 tensor of three."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._work: dist.Work | None = None
        self.sent = False

    def add(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """A micro-batch of `count` samples whose losses sum to `loss_sum`."""
        loss = loss_sum.detach().double()
        n = count.to(loss) if isinstance(count, Tensor) else torch.full_like(loss, float(count))
        self._sums += torch.stack([n, loss, (~loss.isfinite()).double()])

    def send(self) -> None:
        """Start summing over the ranks. Once per step."""
        self.sent = True
        if self._group is not None:
            self._work = dist.all_reduce(self._sums, group=self._group, async_op=True)

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Samples, sum of losses, micro-batches with a loss that is not finite: 0-dim, of all ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        count, loss_sum, bad_losses = self._sums.clone().unbind()
        return count, loss_sum, bad_losses

    def restart(self) -> None:
        """Begin the next step."""
        self._sums.zero_()
        self.sent = False
