"""What the engine says once about a training loop that it can run but that does not do what it seems to."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from torch import Tensor

from launcher.engine.errors import EngineWarning, listed

GRADIENT_STEPS = 10  # enough for layers that start at zero, whose neighbours have no gradient at first
SHOWN = 5  # parameters that a warning names

NO_SAMPLES = (
    "a step had no samples on any rank: it is skipped, and its loss is nan. Call stepper.backward(loss_sum, "
    "count) before stepper.step(), with the number of samples as count."
)
NO_GRADIENTS = (
    "{silent} of {total} parameters had no gradient other than zero in the first {steps} applied steps: "
    "{names}. Weight decay still moves them. If the loss is meant to depend on them, check that the forward "
    "pass uses them, that nothing detaches it (.detach(), .data, torch.no_grad()), and under fp16 that the "
    "loss scale is not too small; if not, freeze them with requires_grad_(False) before the Stepper is built."
)


class Notices:
    """Warnings of one Stepper, each given once. `parameters` are the names of those that have elements."""

    def __init__(self, parameters: Collection[str]) -> None:
        self._given: set[str] = set()
        self._total = len(parameters)
        self._silent = set(parameters)  # those without a gradient in all applied steps that were read
        self._steps = 0

    def warn(self, text: str, stacklevel: int) -> None:
        """Warn, as at `stacklevel` frames above the caller of this."""
        if text not in self._given:
            self._given.add(text)
            warnings.warn(text, EngineWarning, stacklevel=stacklevel + 1)

    def gradients(self, names: Sequence[str], sums: Tensor, stacklevel: int) -> None:
        """Take in the sums of squares, [parameters] on the host, of an applied step's gradients."""
        if not self._silent or self._steps == GRADIENT_STEPS:
            return
        self._steps += 1
        self._silent -= {names[index] for index in sums.nonzero().flatten().tolist()}
        if self._silent and self._steps == GRADIENT_STEPS:
            silent = [name for name in names if name in self._silent]
            text = NO_GRADIENTS.format(
                silent=len(silent),
                total=self._total,
                steps=self._steps,
                names=listed(silent, SHOWN),
            )
            self.warn(text, stacklevel + 1)
