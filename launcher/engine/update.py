"""Optimizers: one pass over flat memory that scales, updates the masters and rounds the weights.

Owns SGD and AdamW, written once as plain tensor expressions. On a CPU they run chunk by chunk, so that
every operation after the first finds its operands in cache; where a compiler is available and worth its
time the same expressions become one kernel. A skipped step writes nothing.

SGD with (Nesterov) momentum: Sutskever et al. 2013, in the form of `torch.optim.SGD` without dampening.
AdamW: Loshchilov and Hutter 2019, in the form of `torch.optim.AdamW`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from launcher.engine.layout import Layout, Segment
from launcher.engine.sums import CHUNK


@dataclass(frozen=True)
class Scalars:
    """What one update needs besides the buffers: 0-dim tensors on the device.

    `multiplier` takes the wire gradient to the clipped mean gradient; `number` is the count of applied
    steps, this one included; `skip` forbids writing.
    """

    multiplier: Tensor  # fp32
    lr: Tensor  # fp64
    number: Tensor  # int64
    skip: Tensor  # bool


class Optimizer(Protocol):
    """The part of an optimizer that the engine relies on."""

    @property
    def lr(self) -> float: ...

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the per-parameter fp32 states, all of which start at zero."""
        ...

    def update(self, master: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
        """Update `master` and `states` in place; `grad` (fp32, the clipped mean) may be overwritten."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(self, master: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
        if self.weight_decay:
            grad.add_(master, alpha=self.weight_decay)
        if self.momentum:
            (momentum,) = states
            momentum.mul_(self.momentum).add_(grad)
            if self.nesterov:
                grad.add_(momentum, alpha=self.momentum)
            else:
                grad.copy_(momentum)
        master.sub_(grad.mul_(scalars.lr))


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay; bias correction follows the applied steps."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    @property
    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(self, master: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
        exp_avg, exp_avg_sq = states
        beta1, beta2 = self.betas
        correction1 = 1 - beta1 ** scalars.number.double()
        correction2 = 1 - beta2 ** scalars.number.double()
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        torch.sqrt(exp_avg_sq, out=grad)
        grad.div_(correction2.sqrt()).add_(self.eps)
        torch.div(exp_avg, grad, out=grad)
        master.mul_(1 - scalars.lr * self.weight_decay).sub_(grad.mul_(scalars.lr / correction1))


class Updater:
    """Runs an optimizer over a layout. Holds the optimizer's states, flat, fp32, zero at the start.

    `compiled` turns the pass into one kernel with torch.compile (Triton on CUDA, C++ on a CPU). Both forms
    give the same values within rounding.
    """

    def __init__(self, layout: Layout, optimizer: Optimizer, compiled: bool) -> None:
        self.optimizer = optimizer
        self._segments = layout.segments
        self.states: dict[str, list[Tensor]] = {
            segment.name: [
                torch.zeros(segment.numel, dtype=torch.float32, device=layout.device)
                for _ in optimizer.states
            ]
            for segment in layout.segments
        }
        run: Callable[..., None] = _predicated
        if compiled:
            run = torch.compile(_predicated, dynamic=False)
        elif layout.device.type == "cpu":
            run = _chunked
        self._run = run

    def step(self, scalars: Scalars) -> None:
        """Apply one update to all segments, or write nothing where `scalars.skip` is true."""
        with torch.no_grad():
            for segment in self._segments:
                self._run(self.optimizer, segment, self.states[segment.name], scalars)

    def named_states(self) -> dict[str, dict[str, Tensor]]:
        """Views of the states by state name, then parameter name."""
        return {
            state: {
                slot.name: slot.view(self.states[segment.name][position])
                for segment in self._segments
                for slot in segment.slots
            }
            for position, state in enumerate(self.optimizer.states)
        }


def _chunked(optimizer: Optimizer, segment: Segment, states: list[Tensor], scalars: Scalars) -> None:
    """The pass on a CPU, a cache-sized chunk at a time. The host may look at the verdict there."""
    if scalars.skip:
        return
    scratch = torch.empty(min(CHUNK, segment.numel))
    for start in range(0, segment.numel, CHUNK):
        part = slice(start, start + CHUNK)
        weight = segment.weight[part]
        grad = scratch[: weight.numel()]
        grad.copy_(segment.grad[part])  # widened first: a product with an fp16 tensor would be fp16
        grad.mul_(scalars.multiplier)
        master = weight.float() if segment.master is None else segment.master[part]
        optimizer.update(master, grad, [state[part] for state in states], scalars)
        if segment.half:
            weight.copy_(master)


def _predicated(optimizer: Optimizer, segment: Segment, states: list[Tensor], scalars: Scalars) -> None:
    """The same pass without a look by the host: old values are written back where the step is skipped."""
    grad = segment.grad.float() * scalars.multiplier
    old = segment.weight.float() if segment.master is None else segment.master
    new = old.clone()
    moved = [state.clone() for state in states]
    optimizer.update(new, grad, moved, scalars)
    for state, after in zip(states, moved, strict=True):
        state.copy_(torch.where(scalars.skip, state, after))
    new = torch.where(scalars.skip, old, new)
    if segment.master is not None:
        segment.master.copy_(new)
    if segment.half:
        segment.weight.copy_(new)
