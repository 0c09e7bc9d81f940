"""Tells now and then how the gradients lie in the range of fp16.

Owns when to look and the form of the `gradients` event. The look is queued behind the step on the device
and read one step late; a step that was skipped has nothing to show, so the next one is looked at instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.engine.diagnostics.exponents import FIRST_EXPONENT, ExponentCounter, ExponentCounts
from launcher.telemetry import Telemetry


class GradientLooks:
    """Looks at the gradients every `every_steps` steps; never, where that is None.

    `gradients` gives the reduced wire gradients by parameter name, valid until the next backward pass. Where
    they are equal on all ranks, only the rank that tells of them needs to look. With a `group`, each rank of
    it gives its own elements, and all look at the same steps: a collective.
    """

    def __init__(
        self,
        gradients: Callable[[], Mapping[str, Tensor]],
        telemetry: Telemetry,
        every_steps: int | None,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._gradients = gradients
        self._telemetry = telemetry
        self._every = every_steps
        self._next = every_steps or 0
        self._counter = ExponentCounter(device, group) if every_steps else None

    def look(self, step: int) -> ExponentCounts | None:
        """The counts of the step just done, where one is due."""
        if self._counter is None or step < self._next:
            return None
        return self._counter.count(self._gradients())

    def tell(self, epoch: int, step: int, scale: float, counts: ExponentCounts) -> None:
        """Emit what a step that was not skipped has shown; `scale` is the loss scale that it used."""
        assert self._every is not None
        self._next = step - step % self._every + self._every
        found = counts.read(scale)
        self._telemetry.emit(
            "gradients",
            step,
            epoch=epoch,
            scale=scale,
            **asdict(found.total),
            zeros=found.zeros,
            first_exponent=FIRST_EXPONENT,
            histogram=list(found.histogram),
            layers={name: asdict(shares) for name, shares in found.layers.items()},
        )
