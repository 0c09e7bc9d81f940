"""Whether a loss is a mean although its sum is asked for: the step would divide it by the count once more.

Reads the last operations of the autograd graph, a few nodes, and nothing of the device. What it does not
know it takes for a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MEAN = 1  # as torch's loss functions save their reduction
LOOKED_AT = 32  # nodes; a sum of more parts than that is taken for a sum
WARNING = (
    "the loss is a mean, or has a mean among its parts, but stepper.backward(loss_sum, count) divides by the "
    "count itself: this one is divided twice. Give the sum (reduction='sum'), or multiply the mean by the "
    "count."
)
_TRANSPARENT = {
    f"{name}Backward0"
    for name in (
        "ToCopy",
        "Clone",
        "Neg",
        "View",
        "Squeeze",
        "Unsqueeze",
        "ReshapeAlias",
        "Alias",
        "Add",
        "Sub",
    )
}


def is_mean(loss: Tensor, count: int | Tensor) -> bool:
    """Whether `loss`, or a part that is added to it, is a mean over its elements. False for a count of 1.

    A mean times anything above 1 passes for a sum: it may be the count. A sum over the count is a mean.
    """
    number = _on_host(count)
    if number is not None and number <= 1:
        return False
    nodes: list[Any] = [loss.grad_fn]
    for _ in range(LOOKED_AT):
        if not nodes:
            return False
        node = nodes.pop()
        if node is None:
            continue
        name = node.name()
        if name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == MEAN:
            return True
        if name in _TRANSPARENT:
            nodes += [parent for parent, _ in node.next_functions]
        elif name.startswith(("MulBackward", "DivBackward")):
            factor = _factor(node, name)
            if factor is not None and number is not None and factor * number == 1.0:
                return True
            if factor is not None and abs(factor) <= 1:  # a weight
                nodes += [parent for parent, _ in node.next_functions]
    return False


def _factor(node: Any, name: str) -> float | None:
    """What a product or quotient multiplies its one differentiable input by; None where that is not known."""
    other = _on_host(getattr(node, "_saved_other", None))
    if other is None or sum(parent is not None for parent, _ in node.next_functions) != 1:
        return None
    if name.startswith("MulBackward"):
        return other
    return 1.0 / other if other else None


def _on_host(value: object) -> float | None:
    """A number, or a tensor of one element that can be read without waiting for a device."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.device == torch.device("cpu") else None
    return float(value) if isinstance(value, int | float) else None
