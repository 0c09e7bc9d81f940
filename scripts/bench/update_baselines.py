"""Baselines of the update benchmark: torch's own parts, composed as well as they can be.

Owns the fused optimizer alone, the composition of torch's parts over lists of tensors and over flat memory,
and the usual loop over tensors. They share no code with the engine. All start from the same values, and
`masters()` returns what became of them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scripts.bench.baselines import TORCH_OPTIMIZERS
from scripts.bench.delivery import loss_delivering

LOSS_SCALE = 2.0**16
CLIP_NORM = 1.0
SEED = 0


def initial_values(shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The same fp32 values for all contenders."""
    torch.manual_seed(SEED)
    return [torch.randn(shape) for shape in shapes]


def gradients_for(shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The same gradients for all contenders, scaled: fp16 for matrices and fp32 for vectors."""
    torch.manual_seed(SEED + 1)
    return [torch.randn(shape).mul_(64).to(_dtype(shape)) for shape in shapes]


def _dtype(shape: torch.Size) -> torch.dtype:
    return torch.float16 if len(shape) >= 2 else torch.float32


class Copy:
    """Memory bandwidth: a copy of as many fp32 elements as there are parameters."""

    def __init__(self, num_parameters: int) -> None:
        self._source, self._target = torch.randn(num_parameters), torch.zeros(num_parameters)

    def step(self) -> None:
        self._target.copy_(self._source)


class Delivery:
    """What autograd takes to hand over the gradients. All others include it but the fused optimizers."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self._weights = [nn.Parameter(torch.zeros(shape, dtype=_dtype(shape))) for shape in shapes]
        self._gradients = gradients_for(shapes)

    def step(self) -> list[Tensor]:
        """By tensor; they stay valid."""
        for weight in self._weights:
            weight.grad = None
        loss_delivering(self._gradients, self._weights).backward()  # type: ignore[no-untyped-call]
        return [weight.grad for weight in self._weights if weight.grad is not None]


class FusedAlone:
    """Torch's fused optimizer on fp32 weights, gradients in place: no check, norm, clip, fp16, delivery.

    `flat` has all parameters in one tensor, in huge pages: the least that an optimizer can cost.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], optimizer: str, options: Mapping[str, Any], flat: bool = False
    ) -> None:
        numel = sum(shape.numel() for shape in shapes)
        self._weights = [
            nn.Parameter(huge_zeros(numel).normal_() if flat else torch.randn(shape))
            for shape in (shapes[:1] if flat else shapes)
        ]
        for weight in self._weights:
            weight.grad = huge_zeros(numel).normal_() if flat else torch.randn_like(weight)
        self._optimizer = TORCH_OPTIMIZERS[optimizer](self._weights, fused=True, **options)  # type: ignore[call-arg]
        if flat:
            _put_states_into_huge_pages(self._optimizer)

    def step(self) -> None:
        self._optimizer.step()


class StockComposition:
    """fp16 weights and gradients around torch's own parts, each over all tensors at once.

    Cast the gradients, `GradScaler.unscale_` (which checks them), `clip_grad_norm_`, the fused optimizer
    under `GradScaler.step`, cast the weights. Vectors are fp32 throughout, as in the engine.
    """

    def __init__(self, shapes: Sequence[torch.Size], optimizer: str, options: Mapping[str, Any]) -> None:
        self._masters = [nn.Parameter(value) for value in initial_values(shapes)]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._weights, self._rounded = half_copies(self._masters)
        self._delivery = Delivery(shapes)
        self._optimizer = TORCH_OPTIMIZERS[optimizer](self._masters, fused=True, **options)  # type: ignore[call-arg]
        self._scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
        self._scaler.scale(torch.zeros(()))  # creates the scale tensor; in training, scaling the loss does

    def step(self) -> None:
        grads = [master.grad for master in self._masters if master.grad is not None]
        torch._foreach_copy_(grads, self._delivery.step())
        self._scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_(self._masters, CLIP_NORM, foreach=True)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._rounded)

    def masters(self) -> list[Tensor]:
        return [master.detach() for master in self._masters]


class FlatStock:
    """The same over flat memory in huge pages, each tensor read as few times as torch's parts allow.

    One norm is check and clip, and the fused optimizer takes both: `grad_scale` divides the gradient and
    `found_inf` skips the step. With a `group` the gradients go through a flat buffer in fp16, which is
    all-reduced; without one they are widened at once.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        optimizer: str,
        options: Mapping[str, Any],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        assert [*shapes] == sorted(shapes, key=len, reverse=True), "matrices first"
        self._shapes, self._group = shapes, group
        numel, half = (sum(s.numel() for s in shapes if len(s) >= least) for least in (0, 2))
        self._master = nn.Parameter(huge_zeros(numel))
        self._master.grad = self._grad = huge_zeros(numel)
        self._weights, self._rounded = huge_zeros(half, torch.float16), self._master.detach()[:half]
        torch._foreach_copy_(self.masters(), initial_values(shapes))
        self._messages: list[tuple[Tensor, Tensor]] = []  # what is sent, and where it is widened to
        self._places = _views(self._grad, shapes)
        if group is not None:
            wires = huge_zeros(half, torch.float16), huge_zeros(numel - half)
            self._messages = [(wires[0], self._grad[:half]), (wires[1], self._grad[half:])]
            self._places = [
                *_views(wires[0], [s for s in shapes if len(s) >= 2]),
                *_views(wires[1], [s for s in shapes if len(s) < 2]),
            ]
        self._delivery = Delivery(shapes)
        self._optimizer: Any = TORCH_OPTIMIZERS[optimizer]([self._master], fused=True, **options)  # type: ignore[call-arg]
        _put_states_into_huge_pages(self._optimizer)
        self._scale, self._growth = torch.full((), LOSS_SCALE), torch.zeros((), dtype=torch.int32)

    def step(self) -> None:
        torch._foreach_copy_(self._places, self._delivery.step())
        works = [dist.all_reduce(wire, group=self._group, async_op=True) for wire, _ in self._messages]
        for work, (wire, grad) in zip(works, self._messages, strict=True):
            work.wait()
            grad.copy_(wire)
        with torch.no_grad():
            norm = torch.linalg.vector_norm(self._grad) / self._scale
            found_inf = (~norm.isfinite()).float()
            clip = (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0)
            self._optimizer.grad_scale, self._optimizer.found_inf = self._scale / clip, found_inf
            self._optimizer.step()
            torch._amp_update_scale_(self._scale, self._growth, found_inf, 2.0, 0.5, 2000)
            self._weights.copy_(self._rounded)

    def masters(self) -> list[Tensor]:
        return _views(self._master.detach(), self._shapes)


class PerTensor:
    """The usual loop: each part iterates over the tensors and allocates new ones."""

    def __init__(self, shapes: Sequence[torch.Size], optimizer: str, options: Mapping[str, Any]) -> None:
        self._masters = [nn.Parameter(value) for value in initial_values(shapes)]
        self._weights, self._rounded = half_copies(self._masters)
        self._delivery = Delivery(shapes)
        self._optimizer = TORCH_OPTIMIZERS[optimizer](self._masters, foreach=False, **options)  # type: ignore[call-arg]

    def step(self) -> None:
        for master, gradient in zip(self._masters, self._delivery.step(), strict=True):
            master.grad = gradient.float() / LOSS_SCALE
        if not all(master.grad.isfinite().all() for master in self._masters if master.grad is not None):
            return
        nn.utils.clip_grad_norm_(self._masters, CLIP_NORM, foreach=False)
        self._optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._rounded, strict=True):
                weight.copy_(master)

    def masters(self) -> list[Tensor]:
        return [master.detach() for master in self._masters]


def half_copies(masters: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """fp16 weights of the matrices, and the masters that they are rounded from."""
    matrices = [master.detach() for master in masters if master.ndim >= 2]
    return [master.half() for master in matrices], matrices


def huge_zeros(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros [numel], on a CPU in pages of 2 MB where the kernel has them."""
    if torch.get_default_device().type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or not numel:
        return torch.zeros(numel, dtype=dtype)
    page = 2 << 20
    memory = mmap.mmap(-1, math.ceil(numel * dtype.itemsize / page) * page)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


def _put_states_into_huge_pages(optimizer: torch.optim.Optimizer) -> None:
    """Run one step, which creates the states, and replace them by zeros."""
    (weight,) = (p for group in optimizer.param_groups for p in group["params"])
    kept = weight.detach().clone()
    optimizer.step()
    with torch.no_grad():
        weight.copy_(kept)
    state = optimizer.state[weight]
    for name, value in state.items():
        if isinstance(value, Tensor) and value.ndim:
            state[name] = huge_zeros(value.numel()).view_as(value)  # the step has put decay into it
        elif isinstance(value, Tensor):
            value.zero_()  # the number of steps


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
