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
    """`agreed` is None until the ranks have agreed, and 0 during a first step without samples."""

    def __init__(
        self, given: int | None, micro_batches: int, device: torch.device, group: async_work.Group
    ) -> None:
        self.agreed = given
        self.micro_batches = micro_batches  # the largest number of backward() calls of a step
        self._device = device
        self._group = group
        self._is_new = False  # whether the ranks agreed on it in this step
        self._expected = 0.0  # samples of this rank in a first step that has not been agreed on yet

    @property
    def value(self) -> int:
        """By what this step divides the loss: this rank's own count until the ranks have agreed."""
        if self.agreed is None:
            return nearest_power_of_two(self._expected) if self._expected else 1
        return max(1, self.agreed)

    def expect(self, count: float | Tensor) -> None:
        """Take this rank's own count until `agree`, unless the ranks have agreed. Waits for the device then.

        `count` is that of this rank's first micro-batch; the others are assumed to be as large.
        """
        if self.agreed is None and not self._expected:
            # In fp64: one of few bits, such as a sum of booleans as uint8, would wrap or become inf.
            counted = float(count.double() if isinstance(count, Tensor) else count)
            check_count(counted)  # one on a GPU has not been read before
            self._expected = counted * self.micro_batches

    def agree(self) -> float:
        """Agree, unless that is done: then a collective, which waits for the device.

        It is the power of two nearest to the mean of the ranks' counts, 0 if no rank had a sample. Returns by
        what to multiply the gradients that this rank has: a power of two, 1 in nearly all steps.
        """
        if self.agreed is not None:
            return 1.0
        own = self.value
        total = torch.zeros((), dtype=torch.float64, device=self._device) + self._expected
        async_work.all_reduce(total, self._group)
        mean = float(total) / (dist.get_world_size(self._group) if self._group else 1)
        self.agreed = nearest_power_of_two(mean) if mean else 0
        self._is_new = True
        return own / self.value

    def restart(self, not_abandoned: Tensor | bool = True) -> None:
        """Begin the next step. What was agreed in a step that was abandoned is dropped."""
        # Reading the flag waits for the device, as agree() already did in this step.
        if self._is_new and not bool(not_abandoned):
            self.agreed = None
        self._is_new, self._expected = False, 0.0
        # 0: no rank had a sample, so the next step agrees again.
        self.agreed = self.agreed or None
