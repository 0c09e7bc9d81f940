"""What the engine says to a model, a loss or a setting that it cannot train with."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

NO_GRADIENT = "the loss does not depend on any trainable parameter. Compute it from the model."


class UnusableError(ValueError):
    """The user's to mend: the text says what was given, what the rule is, and what to do."""


class EngineWarning(UserWarning):
    """A loop that can be run, but that most likely does not train what its author means."""


def refuse_loss(loss_sum: Tensor, count: float | Tensor = 0) -> None:
    """Raise UnusableError for what cannot be back-propagated as the sum of the losses of `count` samples."""
    if loss_sum.dtype != torch.float32 or loss_sum.ndim != 0:
        raise UnusableError(
            f"the loss is {loss_sum.dtype} of shape {tuple(loss_sum.shape)}; it must be fp32, 0-dim. "
            "Take logits.float() before the loss (an fp16 loss times the loss scale would overflow) and "
            "sum over the samples."
        )
    if not loss_sum.requires_grad:
        raise UnusableError(NO_GRADIENT)
    refuse_count(count)


def refuse_count(count: float | Tensor) -> None:
    """Raise UnusableError for what is no number of samples or tokens. Reads a tensor on a CPU only."""
    if isinstance(count, Tensor) and count.numel() != 1:
        raise UnusableError(
            f"backward() was given a count of shape {tuple(count.shape)}; it must be one number."
        )
    if isinstance(count, Tensor) and count.device.type == "cpu":
        count = count.item()  # that of another device would have to be waited for
    if not isinstance(count, Tensor) and not (isinstance(count, Real) and 0 <= count < math.inf):
        raise UnusableError(f"backward() was given {count!r} samples; it must be a number of at least 0.")


def refuse_optimizer(optimizer: object) -> None:
    """Raise UnusableError for what is no optimizer of the engine.

    One of torch has parameters already, and those move when a Stepper is built.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise UnusableError(
            f"a {name} holds the parameters of before. Give its class and options: "
            f"TorchOptimizer(torch.optim.{name}, lr=...)."
        )
    if isinstance(optimizer, type) or not hasattr(optimizer, "lr"):
        name = optimizer.__name__ if isinstance(optimizer, type) else repr(optimizer)
        raise UnusableError(
            f"{name} is not an optimizer. Give SGD(lr), AdamW(lr), or TorchOptimizer(torch.optim.Adam, lr) "
            "for a class of torch.optim."
        )
