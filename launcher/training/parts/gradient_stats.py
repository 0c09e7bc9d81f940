"""Where the gradients lie in the range of fp16, every so many steps.

Owns when to count and the form of the `gradients` event. The count is queued after the step on the device and
read one step late. If a step was skipped, the next one is counted instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.engine.diagnostics.exponents import FIRST_EXPONENT, ExponentCounter, ExponentCounts
from launcher.telemetry import Telemetry
from launcher.telemetry.events import GradientsEvent, LayerShares


class GradientStats:
    """Counts the exponents of the gradients every `every_steps` steps; never if that is None.

    `gradients` returns the reduced wire gradients by parameter name, valid until the next backward pass. If
    they are equal on all ranks, only the reporting rank needs to count. With a `group`, each of its ranks
    counts its own elements, and all count the same steps: a collective.
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

    def count(self, step: int) -> ExponentCounts | None:
        """The counts of the step just done, if due."""
        if self._counter is None or step < self._next:
            return None
        return self._counter.count(self._gradients())

    def record(self, epoch: int, step: int, scale: float, counts: ExponentCounts) -> None:
        """Emit the statistics of a step that was not skipped; `scale` is its loss scale."""
        assert self._every is not None
        self._next = step - step % self._every + self._every
        found = counts.read(scale)
        self._telemetry.emit(
            GradientsEvent(
                step,
                epoch=epoch,
                scale=scale,
                **asdict(found.total),
                zeros=found.zeros,
                first_exponent=FIRST_EXPONENT,
                histogram=list(found.histogram),
                layers={name: LayerShares(**asdict(shares)) for name, shares in found.layers.items()},
            )
        )
