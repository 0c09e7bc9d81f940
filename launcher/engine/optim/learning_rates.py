"""The learning rates of a run, one per applied step: a skipped step does not consume one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import launcher.engine.limits as limits


class LearningRates:
    """A table of rates, whose last one holds from its end on. `device` None: the host decides each step."""

    def __init__(self, rates: Sequence[float], device: torch.device | None) -> None:
        numbers = [float(rate) for rate in rates]  # or a report would have NumPy's numbers
        self._rates: list[float] | Tensor = numbers
        if device is not None:
            self._rates = torch.tensor(numbers, dtype=torch.float64, device=device)
        self._optimizer: LrOptimizer | None = None

    def at(self, applied_steps: Any) -> Any:
        """The rate of the step after so many applied ones: a number, or 0-dim fp64 without a wait."""
        last = len(self._rates) - 1
        if not isinstance(self._rates, Tensor):
            return self._rates[min(int(applied_steps), last)]
        if not last:
            return self._rates.view(())
        # A 1-dim index: with a 0-dim one `rates[...]` reads its value on the host.
        return self._rates.index_select(0, applied_steps.clamp(max=last).long().view(1)).view(())

    def next(self, applied_steps: Any) -> float:
        """The rate of the coming step, or the one that a scheduler has set. Waits for the device."""
        return float(self.at(applied_steps)) if self._optimizer is None else self._optimizer.lr

    def replace(self, rate: float) -> None:
        """Use `rate` from the next applied step on. Does not wait for the device."""
        limits.rate.require("lr", rate)
        if isinstance(self._rates, Tensor):
            self._rates = torch.full((1,), float(rate), dtype=torch.float64, device=self._rates.device)
        else:
            self._rates = [float(rate)]
        if self._optimizer is not None:
            self._optimizer.param_groups[0]["lr"] = float(rate)

    def optimizer(self, applied_steps: Any) -> LrOptimizer:
        """What a scheduler of torch changes the rate of; see `Stepper.lr_optimizer`."""
        if self._optimizer is None:
            self._optimizer = LrOptimizer(self.next(applied_steps))
        return self._optimizer

    def follow_scheduler(self) -> None:
        """Use the rate that a scheduler has set, if there may be one, in the step that is being made."""
        if self._optimizer is not None:
            self.replace(self._optimizer.lr)
            self._optimizer.step()


class LrOptimizer(torch.optim.Optimizer):
    """An optimizer of torch that holds a learning rate and no weights, for `torch.optim.lr_scheduler`.

    Its step() updates nothing; a scheduler only wants to see that it is called.
    """

    def __init__(self, lr: float) -> None:
        super().__init__([torch.zeros(1)], {"lr": lr})

    @property
    def lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""
