"""Detects a mean loss where a sum is required: the step would divide it by the count again.

Reads the last few nodes of the autograd graph, and nothing from the device. Unknown operations count as sums.
"""

from __future__ import annotations

from collections import Counter
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

    If other parts are sums, only the mean of a loss function, or a sum divided by the count, is reported: a
    plain `.mean()` is then a regularizer. As many means of one kind as samples are per-sample means. A mean
    times a factor above 1 counts as a sum: the factor may be the count.
    """
    if getattr(loss.grad_fn, "_saved_reduction", None) == SUM:  # most losses: the rest takes 15 us
        return False
    number = _on_host(count)
    if number is not None and number <= 1:
        return False
    parts = _parts(loss.grad_fn, number)
    if parts is None:
        return False
    means, has_others = parts
    if has_others:
        means = Counter({name: n for name, n in means.items() if not name.startswith("MeanBackward")})
    return any(number is None or amount % number for amount in means.values())


def _parts(root: Any, number: float | None) -> tuple[Counter[str], bool] | None:
    """What a loss that ends in `root` is the sum of; None if there are too many parts.

    The means by the name of their node, and whether there are other parts.
    """
    means: Counter[str] = Counter()
    has_others = False
    nodes: list[Any] = [root]
    for _ in range(MAX_NODES):
        if not nodes:
            return means, has_others
        node = nodes.pop()
        if node is None:  # a constant
            continue
        name = node.name()
        scales = name.startswith(("MulBackward", "DivBackward"))
        factor = _factor(node, name) if scales else None
        if name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == MEAN:
            means[name] += 1
        elif factor is not None and number is not None and factor * number == 1.0:
            means["over the count"] += 1
        elif name in _TRANSPARENT or (factor is not None and 0 < abs(factor) <= 1):  # a weight
            nodes += [parent for parent, _ in node.next_functions]
        elif factor != 0:
            has_others = True
    return None


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
        return float(value.detach()) if value.numel() == 1 and value.device == torch.device("cpu") else None
    return float(value) if isinstance(value, int | float) else None
