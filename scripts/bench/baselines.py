"""What others run for the same work, as its authors would write it.

Owns the updates that the update benchmark compares with: a fused optimizer alone, the stock composition of
torch's parts, and the loop over tensors that people write. They share no code with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LOSS_SCALE = 2.0**16
CLIP_NORM = 1.0
TORCH_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class FusedAlone:
    """Torch's fused optimizer on fp32 weights and fp32 gradients: no check, no norm, no clip, no fp16."""

    def __init__(self, shapes: Sequence[torch.Size], optimizer: str, options: Mapping[str, Any]) -> None:
        self._weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for weight in self._weights:
            weight.grad = torch.randn_like(weight)
        self._optimizer = TORCH_OPTIMIZERS[optimizer](self._weights, fused=True, **options)  # type: ignore[call-arg]

    def step(self) -> None:
        self._optimizer.step()


class StockComposition:
    """fp16 weights and gradients around torch's own parts, each over all tensors at once.

    Cast the gradients, `GradScaler.unscale_` (which checks them), `clip_grad_norm_`, the fused optimizer
    under `GradScaler.step`, cast the weights. Vectors are fp32 throughout, as in the engine.
    """

    def __init__(self, shapes: Sequence[torch.Size], optimizer: str, options: Mapping[str, Any]) -> None:
        self._masters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._weights, self._rounded = half_copies(self._masters)
        self._wire = [scaled_gradient(master) for master in self._masters]
        self._optimizer = TORCH_OPTIMIZERS[optimizer](self._masters, fused=True, **options)  # type: ignore[call-arg]
        self._scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
        self._scaler.scale(torch.zeros(()))  # makes the scale; in training the loss does

    def step(self) -> None:
        grads = [master.grad for master in self._masters if master.grad is not None]
        torch._foreach_copy_(grads, self._wire)
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self._masters, CLIP_NORM, foreach=True)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._rounded)


class PerTensor:
    """What people write: a loop over the tensors for each of the parts, with fresh tensors in between."""

    def __init__(self, shapes: Sequence[torch.Size], optimizer: str, options: Mapping[str, Any]) -> None:
        self._masters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        self._weights, self._rounded = half_copies(self._masters)
        self._wire = [scaled_gradient(master) for master in self._masters]
        self._optimizer = TORCH_OPTIMIZERS[optimizer](self._masters, foreach=False, **options)  # type: ignore[call-arg]

    def step(self) -> None:
        for master, gradient in zip(self._masters, self._wire, strict=True):
            master.grad = gradient.float() / LOSS_SCALE
        if not all(master.grad.isfinite().all() for master in self._masters if master.grad is not None):
            return
        nn.utils.clip_grad_norm_(self._masters, CLIP_NORM, foreach=False)
        self._optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._rounded, strict=True):
                weight.copy_(master)


def half_copies(masters: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """fp16 weights of the matrices, and the masters of which they are rounded copies."""
    matrices = [master.detach() for master in masters if master.ndim >= 2]
    return [master.half() for master in matrices], matrices


def scaled_gradient(master: Tensor) -> Tensor:
    """A gradient as it comes from the wire: scaled, fp16 for matrices and fp32 for vectors."""
    gradient = torch.randn_like(master)
    return gradient.half() if master.ndim >= 2 else gradient
