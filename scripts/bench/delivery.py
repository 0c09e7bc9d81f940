"""Hands prepared gradients to parameters through autograd, so that hooks and accumulation run as in training.

Without a model around it, what a step does after the backward pass can be timed alone. Autograd keeps the
gradients as they are, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor | None, ...]:
        # New tensors of the same memory: autograd takes over what nobody else refers to, and copies the rest.
        return (None, *(gradient.detach() for gradient in ctx.gradients))


def loss_delivering(gradients: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Tensor:
    """A loss of 0 (fp32, 0-dim) whose backward pass gives each parameter its gradient, whatever its scale."""
    loss: Tensor = _Deliver.apply(gradients, *parameters)  # type: ignore[no-untyped-call]
    return loss
