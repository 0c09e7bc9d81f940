"""The learning rate of a Stepper in the form that schedulers of torch take."""

from __future__ import annotations

from typing import Any

import torch


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
