"""What the engine says to a model, a loss or a setting that it cannot train with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NO_GRADIENT = "the loss does not depend on any trainable parameter. Compute it from the model."


class UnusableError(ValueError):
    """The user's to mend: the text says what was given, what the rule is, and what to do."""


def refuse_loss(loss_sum: Tensor, count: int | Tensor = 0) -> None:
    """Raise UnusableError for what cannot be back-propagated as the sum of the losses of `count` samples."""
    if loss_sum.dtype != torch.float32 or loss_sum.ndim != 0:
        raise UnusableError(
            f"the loss is {loss_sum.dtype} of shape {tuple(loss_sum.shape)}; it must be fp32, 0-dim. "
            "Take logits.float() before the loss (an fp16 loss times the loss scale would overflow) and "
            "sum over the samples."
        )
    if not loss_sum.requires_grad:
        raise UnusableError(NO_GRADIENT)
    if isinstance(count, int) and count < 0:
        raise UnusableError(f"backward() was given {count} samples. It must be 0 or more.")


def refuse_torch_optimizer(optimizer: object) -> None:
    """Raise UnusableError for an optimizer that has parameters already: they move when a Stepper is built."""
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise UnusableError(
            f"a {name} holds the parameters of before. Give its class and options: "
            f"TorchOptimizer(torch.optim.{name}, lr=...)."
        )


def refuse_settings(
    clip_norm: float | None, rates: Sequence[float], micro_batches: int, reference_count: int | None
) -> None:
    """Raise UnusableError for what would train in the wrong direction, or not at all, without a word."""
    if clip_norm is not None and not clip_norm > 0:
        raise UnusableError(f"clip_norm={clip_norm}: it must be above 0, or None.")
    if not rates or not all(rate >= 0 for rate in rates):
        raise UnusableError("learning rates: there must be one at least, and all of them 0 or more.")
    if micro_batches < 1:
        raise UnusableError(f"micro_batches={micro_batches}: it must be 1 or more.")
    if reference_count is not None and reference_count not in (1 << bit for bit in range(63)):
        raise UnusableError(f"reference_count={reference_count}: it must be a power of two, 1 or more.")
