"""Steppers, batches and digests that the tests on a GPU share; the device is always given."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.engine import AdamW, Policy, Scaling, Stepper
from tests.models import conv_net

BATCH = 64


def batch_of(device: torch.device, step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """x [size, 3, 8, 8] and classes [size] of 3; the same on every call and device."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 3, 8, 8, generator=generator)
    classes = torch.randint(3, (size,), generator=generator)
    return x.to(device), classes.to(device)


def stepper_of(device: torch.device, policy: Policy, **settings: Any) -> Stepper:
    """A small convolutional net. Its scale overflows at first and grows again: both verdicts occur."""
    scaling = Scaling(init=2**24, growth_interval=4)
    defaults: dict[str, Any] = {
        "scaling": scaling if policy.arithmetic == torch.float16 else None,
        "clip_norm": 1.0,
        "learning_rates": [0.01, 0.005, 0.002],
        "reference_count": BATCH,
    }
    return Stepper(conv_net().to(device), AdamW(0.01), policy, **(defaults | settings))


def forward_backward(stepper: Stepper, x: Tensor, classes: Tensor) -> None:
    with stepper.forward():
        loss = F.cross_entropy(stepper.model(x).float(), classes, reduction="sum")
    stepper.backward(loss, len(classes))


def state_on_host(stepper: Stepper) -> list[list[float]]:
    """Everything that a step changes, to be compared bit by bit."""
    state = stepper.state()
    tensors = [*state.weights.values(), *state.optimizer.values(), *state.buffers.values()]
    return [tensor.double().flatten().tolist() for tensor in tensors]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
