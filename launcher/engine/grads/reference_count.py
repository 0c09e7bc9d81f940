"""The reference count (n0): the usual number of samples (or tokens) per step and rank, a power of two.

The backward pass starts with S / n0, so that gradients are of the size of a mean whatever the batch. Owns the
agreement of the ranks on it, from the counts of the first step, where it was not given.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.async_work as async_work
from launcher.engine.errors import check_count
from launcher.engine.precision.loss_scale import nearest_power_of_two


class ReferenceCount:
    """`agreed` is None until the ranks have agreed, in the first step that has samples on any of them."""

    def __init__(
        self, given: int | None, micro_batches: int, device: torch.device, group: async_work.Group
    ) -> None:
        self.agreed = given
        self.micro_batches = micro_batches  # the largest number of backward() calls of a step
        self._device = device
        self._group = group
        self._has_communicated = False  # whether the ranks have exchanged their counts in this step
        self.restart()

    def restart(self, not_abandoned: Tensor | bool = True) -> None:
        """Begin the next step. What was agreed in a step that was abandoned is dropped, as its batch is."""
        # Reading the flag waits for the device, as agree() did in that step.
        if self._has_communicated and not bool(not_abandoned):
            self.agreed = None
        self._has_communicated = False
        self._own_count = 0.0  # samples of this rank in a step in which the ranks have not agreed yet

    @property
    def value(self) -> int:
        """By what this step divides the loss: this rank's own count until the ranks have agreed."""
        return self.agreed or nearest_power_of_two(self._own_count)

    def expect(self, count: float | Tensor) -> None:
        """Take this rank's own count until `agree`, unless the ranks have agreed. Waits for the device then.

        `count` is that of this rank's first micro-batch; the others are assumed to be as large.
        """
        if self.agreed is None and not self._own_count:
            # In fp64: one of few bits, such as a sum of booleans as uint8, would wrap or become inf.
            counted = float(count.double() if isinstance(count, Tensor) else count)
            check_count(counted)  # one on a GPU has not been read before
            self._own_count = counted * self.micro_batches

    def agree(self) -> float:
        """Agree, unless that is done: then a collective, which waits for the device.

        It is the power of two nearest to the mean of the ranks' counts. Returns by what to multiply the
        gradients that this rank has: a power of two, 1 in nearly all steps. If no rank had a sample, there is
        no gradient, and the next step agrees.
        """
        # Not twice in a step, which may be abandoned after this: the other ranks do it once.
        if self.agreed is not None or self._has_communicated:
            return 1.0
        own = self.value
        total = torch.zeros((), dtype=torch.float64, device=self._device) + self._own_count
        async_work.all_reduce(total, self._group)
        self._has_communicated = True
        if mean := float(total) / (dist.get_world_size(self._group) if self._group else 1):
            self.agreed = nearest_power_of_two(mean)
        return own / self.value
