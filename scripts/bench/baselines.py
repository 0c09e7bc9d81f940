"""Baselines of the benchmarks, written as their authors recommend.

Owns the updates of the update benchmark (a fused optimizer alone, the composition of torch's own parts, the
usual loop over tensors) and whole training steps: autocast with GradScaler, in plain torch, under Accelerate
and under Lightning Fabric. They share no code with the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
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
        self._scaler.scale(torch.zeros(()))  # creates the scale tensor; in training, scaling the loss does

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
    """The usual loop: each part iterates over the tensors and allocates new ones."""

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
    """fp16 weights of the matrices, and the masters that they are rounded from."""
    matrices = [master.detach() for master in masters if master.ndim >= 2]
    return [master.half() for master in matrices], matrices


def scaled_gradient(master: Tensor) -> Tensor:
    """A gradient as it comes from the wire: scaled, fp16 for matrices and fp32 for vectors."""
    gradient = torch.randn_like(master)
    return gradient.half() if master.ndim >= 2 else gradient


class AutocastLoop:
    """autocast + GradScaler + fused optimizer + channels_last, without synchronization between steps.

    `half` False is the same loop in fp32, or in TF32 where that is allowed.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        inputs: Tensor,
        labels: Tensor,
        optimizer: str = "sgd",
        half: bool = True,
    ) -> None:
        self._device = device
        self._half = half
        self._model = channels_last(model.to(device))
        self._inputs, self._labels = channels_last(inputs.to(device)), labels.to(device)
        self._optimizer = stock_optimizer(self._model, optimizer)
        self._scaler = torch.amp.GradScaler(device.type, enabled=half)

    def step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        half = torch.autocast(self._device.type, torch.float16)
        with half if self._half else contextlib.nullcontext():
            loss = F.cross_entropy(self._model(self._inputs).float(), self._labels)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()


class AccelerateLoop:
    """The same through Accelerate, as its examples have it."""

    def __init__(self, model: nn.Module, device: torch.device, inputs: Tensor, labels: Tensor) -> None:
        from accelerate import Accelerator

        self._accelerator = Accelerator(mixed_precision="fp16", cpu=device.type == "cpu")
        model = channels_last(model)
        self._model, self._optimizer = self._accelerator.prepare(model, stock_optimizer(model, "sgd"))
        self._inputs, self._labels = channels_last(inputs.to(device)), labels.to(device)

    def step(self) -> None:
        self._optimizer.zero_grad()
        with self._accelerator.autocast():
            loss = F.cross_entropy(self._model(self._inputs).float(), self._labels)
        self._accelerator.backward(loss)
        self._optimizer.step()


class FabricLoop:
    """The same through Lightning Fabric."""

    def __init__(self, model: nn.Module, device: torch.device, inputs: Tensor, labels: Tensor) -> None:
        from lightning.fabric import Fabric

        self._fabric = Fabric(accelerator=device.type, devices=1, precision="16-mixed")
        model = channels_last(model)
        self._model, self._optimizer = self._fabric.setup(model, stock_optimizer(model, "sgd"))
        self._inputs, self._labels = channels_last(inputs.to(device)), labels.to(device)

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self._model(self._inputs).float(), self._labels)
        self._fabric.backward(loss)
        self._optimizer.step()


def stock_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Torch's fused optimizer, with the options of the engine's side."""
    options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
    if name == "sgd":
        options = {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    return TORCH_OPTIMIZERS[name](model.parameters(), fused=True, **options)  # type: ignore[call-arg]


def channels_last(images: Any) -> Any:
    """Convert images and convolutions to channels_last, the format of tensor cores."""
    if isinstance(images, nn.Module) or images.ndim == 4:
        return images.to(memory_format=torch.channels_last)
    return images
