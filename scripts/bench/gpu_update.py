"""What the GPU benchmark times of an update: ours, torch's fused optimizer alone, and a copy of the memory.

Prepared gradients are handed to parameters through autograd, so that what a step does after the backward pass
can be timed without a model around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.engine import Policy, Stepper, StepResult
from launcher.engine.optim.optimizers import Optimizer
from scripts.bench.baselines import TORCH_OPTIMIZERS
from scripts.bench.shapes import Shapes

LOSS_SCALE = 2.0**16
CLIP_NORM = 1.0
SEED = 0


def initial_values(shapes: Sequence[torch.Size]) -> list[Tensor]:
    """fp32 values."""
    torch.manual_seed(SEED)
    return [torch.randn(shape) for shape in shapes]


def gradients_for(shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Gradients, scaled: fp16 for matrices and fp32 for vectors."""
    torch.manual_seed(SEED + 1)
    return [torch.randn(shape).mul_(64).to(_dtype(shape)) for shape in shapes]


def _dtype(shape: torch.Size) -> torch.dtype:
    return torch.float16 if len(shape) >= 2 else torch.float32


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


class Ours:
    """A Stepper's backward and step on a module without a forward pass. Reads each report one step late."""

    def __init__(self, shapes: Shapes, optimizer: Optimizer) -> None:
        sizes = list(shapes.values())
        holder = nn.Module()
        for name, value in zip(shapes, initial_values(sizes), strict=True):
            holder.register_parameter(name.replace(".", "_"), nn.Parameter(value))
        self._stepper = Stepper(
            holder,
            optimizer,
            Policy.fp16(),
            clip_norm=CLIP_NORM,
            reference_count=1,
            emulate=False,
        )
        assert self._stepper.loss_scale == LOSS_SCALE
        self._parameters = list(holder.parameters())
        self._gradients = gradients_for(sizes)
        self._waiting: list[StepResult] = []

    def step(self) -> None:
        self._stepper.backward(loss_delivering(self._gradients, self._parameters), 1)
        self._waiting.append(self._stepper.step())
        if len(self._waiting) > 1:
            self._waiting.pop(0).read()


class Copy:
    """Memory bandwidth: a copy of as many fp32 elements as there are parameters."""

    def __init__(self, num_parameters: int) -> None:
        self._source, self._target = torch.randn(num_parameters), torch.zeros(num_parameters)

    def step(self) -> None:
        self._target.copy_(self._source)


class FusedAlone:
    """Torch's fused optimizer on fp32 weights, gradients in place: no check, norm, clip, fp16, delivery."""

    def __init__(self, shapes: Sequence[torch.Size], optimizer: str, options: Mapping[str, Any]) -> None:
        self._weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for weight in self._weights:
            weight.grad = torch.randn_like(weight)
        self._optimizer = TORCH_OPTIMIZERS[optimizer](self._weights, fused=True, **options)  # type: ignore[call-arg]

    def step(self) -> None:
        self._optimizer.step()
