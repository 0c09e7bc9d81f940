"""Detects a mean loss where a sum is required: the step would divide it by the count again.

Reads the last few nodes of the autograd graph, and nothing from the device. Unknown operations count as sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MEAN, SUM = 1, 2  # as torch's loss functions save their reduction
MAX_NODES = 1024  # about 2 us each; a loss of more parts counts as a sum
WARNING = (
    "the loss is a mean, or has a mean among its parts, and stepper.backward() divides by the count: it is "
    "divided twice. Give the sum (reduction='sum'), or multiply the mean by the count. With weights or "
    "a mask, give the weighted sum, and the sum of the weights as count."
)
_LINEAR = "ToCopy Clone Neg View Squeeze Unsqueeze ReshapeAlias Alias Add Sub"  # of which a mean stays a mean
_TRANSPARENT = {f"{name}Backward0" for name in _LINEAR.split()}


def is_mean(loss: Tensor, count: float | Tensor) -> bool:
    """Whether `loss`, or a part that is added to it, is a mean over its elements. False for a count of 1.

    Beside other parts a plain `.mean()` is a regularizer. As many means as samples are per-sample means. A
    mean times a factor above 1 counts as a sum: the factor may be the count.
    """
    if getattr(loss.grad_fn, "_saved_reduction", None) == SUM:  # most losses: the rest takes 15 us
        return False
    number = _on_host(count)
    if number is not None and number <= 1:
        return False
    # Parts of the loss: means of torch's loss functions or by a division, calls of mean(), anything else.
    means, plain_means, has_others = 0, 0, False
    nodes: list[Any] = [loss.grad_fn]
    for _ in range(MAX_NODES):
        if not nodes:
            if not has_others:
                means += plain_means
            return means > 0 and (number is None or means % number != 0)
        node = nodes.pop()
        if node is None:  # a constant
            continue
        name = node.name()
        factor = _factor(node, name)
        is_over_count = factor is not None and number is not None and factor * number == 1.0
        reduction = getattr(node, "_saved_reduction", None)
        if name.startswith("MeanBackward"):
            plain_means += 1
        elif reduction == MEAN or is_over_count:
            means += 1
        elif name in _TRANSPARENT or (factor is not None and 0 < abs(factor) <= 1):  # a weight
            nodes += [parent for parent, _ in node.next_functions]
        elif factor != 0:
            has_others = True
    return False  # too many parts


def _factor(node: Any, name: str) -> float | None:
    """What a product or quotient multiplies its one differentiable input by; None for all else."""
    if not name.startswith(("MulBackward", "DivBackward")):
        return None
    other = _on_host(getattr(node, "_saved_other", None))
    if other is None or sum(parent is not None for parent, _ in node.next_functions) != 1:
        return None
    if name.startswith("MulBackward"):
        return other
    return 1.0 / other if other else None


def _on_host(value: object) -> float | None:
    """A number, or a tensor of one element that can be read without waiting for a device."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 and value.device == torch.device("cpu") else None
    return float(value) if isinstance(value, int | float) else None
