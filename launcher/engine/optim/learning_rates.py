"""The learning rates of a run, one per applied step: a skipped step does not consume one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LearningRates:
    """A table of rates, whose last one holds from its end on. `device` None: the host decides each step."""

    def __init__(self, rates: Sequence[float], device: torch.device | None) -> None:
        numbers = [float(rate) for rate in rates]  # or a report would have NumPy's numbers
        self._rates: list[float] | Tensor = numbers
        if device is not None:
            self._rates = torch.tensor(numbers, dtype=torch.float64, device=device)

    def at(self, applied_steps: Any) -> Any:
        """The rate of the step after so many applied ones: a number, or 0-dim fp64 without a wait."""
        last = len(self._rates) - 1
        if not isinstance(self._rates, Tensor):
            return self._rates[min(int(applied_steps), last)]
        if not last:
            return self._rates.view(())
        # A 1-dim index: with a 0-dim one `rates[...]` reads its value on the host.
        return self._rates.index_select(0, applied_steps.clamp(max=last).long().view(1)).view(())

    def replace(self, rate: float) -> None:
        """Use `rate` from the next applied step on. Does not wait for the device."""
        if isinstance(self._rates, Tensor):
            self._rates = torch.full((1,), float(rate), dtype=torch.float64, device=self._rates.device)
        else:
            self._rates = [float(rate)]
