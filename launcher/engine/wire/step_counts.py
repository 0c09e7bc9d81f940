"""What each step reduces besides gradients: samples, the sum of their losses, bad losses, votes.

Owns the one small collective of a step. Every rank launches it right before the first bucket, so the order of
collectives is the same everywhere. Until then the last addition can be taken back. Where gradients are
sharded, the collective of their norms at the end of a step carries these numbers too. Also agrees on n0, from
the counts of the first step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.works as works
from launcher.engine.limits import VOTES
from launcher.engine.precision.loss_scale import nearest_power_of_two

FIELDS = 3 + VOTES  # samples, sum of losses, bad losses, then the votes


class Tally:
    """Sums over the micro-batches of this rank, then over the ranks: FIELDS numbers.

    `on_host`: in Python's numbers, where reading a loss does not wait; a tensor only where a collective takes
    them. Else in one fp64 tensor on the device, which the host does not read.
    """

    def __init__(self, on_host: bool, device: torch.device, group: works.Group) -> None:
        self._on_host, self._group = on_host, group
        # Any: a list, or a tensor.
        self._sums: Any = [] if on_host else torch.zeros(FIELDS, dtype=torch.float64, device=device)
        self.restart()

    def restart(self) -> None:
        """Begin the next step."""
        if self._on_host:
            self._sums = [0.0] * FIELDS
        else:
            self._sums.zero_()
        # The micro-batch that may be taken back: count, loss, and what is 0 if that is finite.
        self._newest: tuple[object, object, Any] | None = None
        self._is_first = True  # no micro-batch is included yet
        self._shared: Tensor | None = None  # for a collective, once they have been given to one
        self._work: dist.Work | None = None

    def add(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """A micro-batch of `count` samples whose losses sum to `loss_sum`."""
        self._include_newest()
        if self._on_host:
            number = loss_sum.item()
            self._newest = (float(count), number, float(not math.isfinite(number)))
        else:
            loss = loss_sum.detach().view(())
            n = count.detach().to(loss.device).view(()) if isinstance(count, Tensor) else float(count)
            self._newest = (n, loss, loss - loss)

    def take_back(self) -> None:
        """Forget the micro-batch that was added last."""
        self._newest = None

    def vote(self, question: int, votes: int) -> None:
        """Record this rank's votes for `question`."""
        self._sums[3 + question] = float(votes)

    def send(self) -> None:
        """Start summing over the ranks. Once per step."""
        if self._group is None:
            self._include_newest()
        else:
            self._work = works.started(dist.all_reduce(self.give(), group=self._group, async_op=True))

    def give(self) -> Tensor:
        """This rank's sums, fp64 [FIELDS], for another collective in place of `send`. Once per step."""
        self._include_newest()
        self._shared = torch.tensor(self._sums, dtype=torch.float64) if self._on_host else self._sums
        return self._shared

    def receive(self, totals: Tensor) -> None:
        """Take what that collective has made of them."""
        self._shared = totals

    def totals(self) -> object:
        """The sums of all ranks: samples, losses, micro-batches with a bad loss, votes; [FIELDS].

        A list on the host, a tensor on the device.
        """
        if self._shared is None:
            return self._sums
        if self._work is not None:
            works.wait_for(self._work, self._shared)
            self._work = None
        return self._shared.tolist() if self._on_host else self._shared

    def tensors(self) -> list[Tensor]:
        """What is held on the device between steps."""
        return [] if self._on_host else [self._sums]

    def _include_newest(self) -> None:
        if self._newest is None:
            return
        count, loss, difference = self._newest
        if self._on_host:
            for position, number in enumerate(self._newest):
                self._sums[position] += number
        else:
            counts, losses, bad = self._sums[:3].unbind()
            counts.add_(count)  # one kernel each, which converts too: a vector of these would take three more
            losses.add_(loss)
            if self._is_first:
                torch.ne(difference, 0.0, out=bad)
            else:
                bad.add_(difference != 0)
        self._newest, self._is_first = None, False


class Reference:
    """n0 of the loss boundary: the usual number of samples (or tokens) per step and rank.

    `count` is None until the ranks have agreed on it, and 0 during a first step without samples.
    """

    def __init__(
        self, count: int | None, micro_batches: int, device: torch.device, group: works.Group
    ) -> None:
        self.count = count
        self.micro_batches = micro_batches  # the largest number of backward() calls of a step
        self._device = device
        self._group = group
        self._is_new = False  # whether the ranks agreed on it in this step
        self._expected = 0.0  # samples of this rank in a first step that has not been agreed on yet

    @property
    def divisor(self) -> int:
        """The divisor of the loss before the backward pass."""
        if self.count is None:
            return nearest_power_of_two(self._expected) if self._expected else 1
        return max(1, self.count)

    def expect(self, count: float | Tensor) -> None:
        """Take this rank's own n0 until `agree`, unless the ranks have agreed. Waits for the device then.

        `count` is that of this rank's first micro-batch; the others are assumed to be as large.
        """
        if self.count is None and not self._expected:
            # In fp64: one of few bits, such as a sum of booleans as uint8, would wrap or become inf.
            counted = count.double() if isinstance(count, Tensor) else count
            self._expected = float(counted * self.micro_batches)

    def agree(self) -> float:
        """Agree on n0, unless that is done: then a collective, which waits for the device.

        It is the power of two nearest to the mean of the ranks' counts, 0 if no rank had a sample. Returns by
        what to multiply the gradients that this rank has: a power of two, 1 in nearly all steps.
        """
        if self.count is not None:
            return 1.0
        own = self.divisor
        total = torch.zeros((), dtype=torch.float64, device=self._device) + self._expected
        works.all_reduce(total, self._group)
        mean = float(total) / (dist.get_world_size(self._group) if self._group else 1)
        self.count = nearest_power_of_two(mean) if mean else 0
        self._is_new = True
        return own / self.divisor

    def restart(self, abandoned: Tensor | bool = False) -> None:
        """Begin the next step. An n0 from an `abandoned` step is dropped."""
        # Reading the flag waits for the device, as agree() already did in this step.
        if self._is_new and bool(abandoned):
            self.count = None
        self._is_new, self._expected = False, 0.0
        # 0: no rank had a sample, so the next step agrees again.
        self.count = self.count or None
