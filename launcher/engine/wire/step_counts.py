"""What each step reduces besides gradients: samples, the sum of their losses, bad losses, votes.

Owns the one small collective of a step. Every rank launches it right before the first bucket, so the order of
collectives is the same everywhere. Until then the last addition can be taken back. Where gradients are
sharded, the collective of their norms at the end of a step carries these numbers too. Also agrees on n0, from
the counts of the first step.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.works as works
from launcher.engine.limits import VOTES
from launcher.engine.precision.loss_scale import nearest_power_of_two

FIELDS = 3 + VOTES  # samples, sum of losses, bad losses, then the votes


class HostTally:
    """Sums over the micro-batches of this rank, then over the ranks: FIELDS numbers, in Python's.

    They are a tensor only where a collective takes them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._sums = [0.0] * FIELDS
        self._newest: tuple[float, float, float] | None = None  # the micro-batch that may be taken back
        self._shared: Tensor | None = None  # once they have been sent
        self._work: dist.Work | None = None

    def add(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """A micro-batch of `count` samples whose losses sum to `loss_sum`."""
        self._include_newest()
        loss = loss_sum.item()
        self._newest = (float(count), loss, float(not math.isfinite(loss)))

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
            self._work = _started(self.give(), self._group)

    def give(self) -> Tensor:
        """This rank's sums, fp64 [FIELDS], for another collective in place of `send`. Once per step."""
        self._include_newest()
        self._shared = torch.tensor(self._sums, dtype=torch.float64)
        return self._shared

    def receive(self, totals: Tensor) -> None:
        """Take what that collective has made of them."""
        self._shared = totals

    def totals(self) -> list[float]:
        """The sums of all ranks: samples, losses, micro-batches with a bad loss, votes; [FIELDS]."""
        if self._shared is None:
            return self._sums
        if self._work is not None:
            works.wait_for(self._work, self._shared)
            self._work = None
        found: list[float] = self._shared.tolist()
        return found

    def tensors(self) -> list[Tensor]:
        """What is held on the device between steps."""
        return []

    def restart(self) -> None:
        """Begin the next step."""
        self._sums = [0.0] * FIELDS
        self._newest = self._shared = None

    def _include_newest(self) -> None:
        if self._newest is not None:
            for position, number in enumerate(self._newest):
                self._sums[position] += number
            self._newest = None


class DeviceTally:
    """The same in one fp64 tensor on the device, which the host does not read."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._sums = torch.zeros(FIELDS, dtype=torch.float64, device=device)
        # Of the micro-batch that may still be taken back: count, loss, and 0 or nan where that is not finite.
        self._newest: tuple[Tensor | float, Tensor, Tensor] | None = None
        self._work: dist.Work | None = None
        self._is_first = True  # no micro-batch is included yet

    def add(self, loss_sum: Tensor, count: float | Tensor) -> None:
        self._include_newest()
        loss = loss_sum.detach().view(())
        n = count.detach().to(loss.device).view(()) if isinstance(count, Tensor) else float(count)
        self._newest = (n, loss, loss - loss)

    def take_back(self) -> None:
        self._newest = None

    def vote(self, question: int, votes: int) -> None:
        self._sums[3 + question] = votes

    def send(self) -> None:
        self._work = _started(self.give(), self._group)

    def give(self) -> Tensor:
        self._include_newest()
        return self._sums

    def receive(self, totals: Tensor) -> None:
        self._sums.copy_(totals)

    def totals(self) -> Tensor:
        if self._work is not None:
            works.wait_for(self._work, self._sums)
            self._work = None
        return self._sums

    def tensors(self) -> list[Tensor]:
        return [self._sums]

    def restart(self) -> None:
        self._sums.zero_()
        self._newest = self._work = None
        self._is_first = True

    def _include_newest(self) -> None:
        if self._newest is not None:
            count, loss, difference = self._newest
            counts, losses, bad = self._sums[:3].unbind()
            counts.add_(count)  # one kernel each, which converts too: a vector of these would take three more
            losses.add_(loss)
            if self._is_first:
                torch.ne(difference, 0.0, out=bad)
            else:
                bad.add_(difference != 0)
            self._newest, self._is_first = None, False


Tally = HostTally | DeviceTally


def tally_on(on_host: bool, device: torch.device, group: dist.ProcessGroup | None) -> Tally:
    """The form for the host, where reading a loss does not wait, or for a device."""
    return HostTally(group) if on_host else DeviceTally(device, group)


def _started(sums: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start their sum over the ranks, where there are several."""
    return works.started(dist.all_reduce(sums, group=group, async_op=True)) if group is not None else None


class Reference:
    """n0 of the loss boundary: the usual number of samples (or tokens) per step and rank.

    `count` is None until the ranks have agreed on it, and 0 during a first step without samples.
    """

    def __init__(
        self, count: int | None, micro_batches: int, device: torch.device, group: dist.ProcessGroup | None
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
