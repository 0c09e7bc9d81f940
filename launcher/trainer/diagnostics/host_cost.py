"""What the host spends on a layer whatever its size: the part of a pass that no faster arithmetic saves.

Owns a small measurement, made once, before the first step. It changes no state, not even a generator's, and
never waits for the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

REPEATS = 15  # the first ones also warm up; their median leaves those out


def host_ms_per_layer(
    forward: Callable[[], AbstractContextManager[object]], device: torch.device, dtype: torch.dtype
) -> float:
    """Milliseconds for forward and backward pass of a 4 x 4 linear layer with a ReLU, on one sample.

    `forward` is the precision context of the run, `dtype` that of its weights. On a GPU it is the time to
    launch the kernels.
    """
    weight = torch.zeros(4, 4, dtype=dtype, device=device, requires_grad=True)
    x = torch.ones(1, 4, dtype=dtype, device=device)
    taken: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        with forward():
            y = torch.relu(nn.functional.linear(x, weight))
        torch.autograd.grad(y, weight, torch.ones_like(y))
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def num_layers(model: nn.Module) -> int:
    """Modules that have trainable parameters of their own."""
    return sum(
        any(p is not None and p.requires_grad for p in module._parameters.values())
        for module in model.modules()
    )
