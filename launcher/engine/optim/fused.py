"""Optimizers: one pass over flat memory that scales, updates the masters and rounds the weights.

Owns SGD and AdamW, each in two forms: tensor expressions that torch.compile fuses into one kernel, and calls
of torch's fused kernel, chunk by chunk, so that the widened gradient takes a fixed amount of memory. Both
compute the same values within rounding. A skipped step changes nothing; on a GPU the kernels read the skip
flag, not the host.

SGD with (Nesterov) momentum: Sutskever et al. 2013, in the form of `torch.optim.SGD` without dampening.
AdamW: Loshchilov and Hutter 2019, in the form of `torch.optim.AdamW`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

import launcher.engine.limits as limits
from launcher.engine.errors import UnusableError
from launcher.engine.flat.allocation import flat_zeros
from launcher.engine.flat.layout import Piece
from launcher.engine.state import refuse_misfits
from launcher.engine.wire.shards import Shards

CHUNK = 1 << 19  # elements on a CPU: 2 MB of widened gradient stay in cache; smaller ones cost more calls
DEVICE_CHUNK = 1 << 24  # elements on a GPU: 64 MB, less than the activations that are free by then


@dataclass(frozen=True)
class Scalars:
    """What one update needs besides the buffers: 0-dim tensors on the device.

    `multiplier` turns the wire gradient into the clipped mean gradient; `number` is the count of applied
    steps, this one included; `skip` forbids writing. `factors` are those of the optimizer, fp32. `found_inf`
    is `skip` as a fused kernel reads it, fp32; None where the step is known to be applied.
    """

    multiplier: Tensor  # fp32
    lr: Tensor  # fp64
    number: Tensor  # int64
    skip: Tensor  # bool
    factors: tuple[Tensor, ...] = ()
    found_inf: Tensor | None = None


class Optimizer(Protocol):
    """The part of an optimizer that the engine relies on."""

    @property
    def lr(self) -> float: ...

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the per-parameter fp32 states, all of which start at zero."""
        ...

    def factors(self, scalars: Scalars) -> tuple[Tensor, ...]:
        """Scalars that `update` needs, computed once per step from the rate and the step's number."""
        ...

    def update(self, master: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
        """Update `master` and `states` in place; `grad` (fp32, the clipped mean) may be overwritten."""
        ...

    def fused(
        self, masters: list[Tensor], grads: list[Tensor], states: Sequence[list[Tensor]], scalars: Scalars
    ) -> None:
        """The same with torch's fused kernel, for several tensors; `states` by state, then by tensor.

        On CUDA the kernel takes the rate in fp32 and reads it, the number and the verdict on the device.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as torch.optim.SGD; weight decay is added to the gradient.

    `lr` is per applied step; a Stepper's `learning_rates` and `lr` replace it. Raises UnusableError.
    A parameter without a gradient is updated with a zero gradient (see Stepper).
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        limits.not_negative.require("SGD lr", self.lr)
        limits.share.require("SGD momentum", self.momentum)
        limits.flag.require("SGD nesterov", self.nesterov)
        limits.not_negative.require("SGD weight_decay", self.weight_decay)
        if self.nesterov and not self.momentum:
            raise UnusableError("SGD nesterov=True: it needs momentum above 0.")

    @property
    def states(self) -> tuple[str, ...]:
        """`momentum`, fp32 and as many elements as the parameter; none where momentum is 0."""
        return ("momentum",) if self.momentum else ()

    def factors(self, scalars: Scalars) -> tuple[Tensor, ...]:
        """The rate."""
        return (scalars.lr.float(),)

    def update(self, master: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
        """As `Optimizer.update`."""
        if self.weight_decay:
            grad.add_(master, alpha=self.weight_decay)
        if self.momentum:
            (momentum,) = states
            momentum.mul_(self.momentum).add_(grad)
            if self.nesterov:
                grad.add_(momentum, alpha=self.momentum)
            else:
                grad.copy_(momentum)
        (lr,) = scalars.factors
        master.sub_(grad.mul_(lr))

    def fused(
        self, masters: list[Tensor], grads: list[Tensor], states: Sequence[list[Tensor]], scalars: Scalars
    ) -> None:
        """As `Optimizer.fused`."""
        torch._fused_sgd_(
            masters,
            grads,
            states[0] if states else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=scalars.lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,  # the momentum buffers exist, as zeros
            found_inf=scalars.found_inf,
        )


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as torch.optim.AdamW; bias correction follows the applied steps.

    `lr` is per applied step; a Stepper's `learning_rates` and `lr` replace it. Raises UnusableError.
    A parameter without a gradient is updated with a zero gradient (see Stepper).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        limits.not_negative.require("AdamW lr", self.lr)
        limits.two_shares.require("AdamW betas", self.betas)
        limits.positive.require("AdamW eps", self.eps)  # at 0 a gradient that stays zero gives 0 / 0
        limits.not_negative.require("AdamW weight_decay", self.weight_decay)

    @property
    def states(self) -> tuple[str, ...]:
        """Means of the gradient and of its square, fp32 and as many elements as the parameter each."""
        return ("exp_avg", "exp_avg_sq")

    def factors(self, scalars: Scalars) -> tuple[Tensor, ...]:
        """Decay factor of the weights, bias-corrected rate, and bias correction of the square root."""
        beta1, beta2 = self.betas
        correction1 = 1 - beta1 ** scalars.number.double()
        correction2 = 1 - beta2 ** scalars.number.double()
        keep = 1 - scalars.lr * self.weight_decay
        return keep.float(), (scalars.lr / correction1).float(), correction2.rsqrt().float()

    def update(self, master: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
        """As `Optimizer.update`."""
        exp_avg, exp_avg_sq = states
        beta1, beta2 = self.betas
        keep, rate, widen = scalars.factors
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        torch.sqrt(exp_avg_sq, out=grad)
        grad.mul_(widen).add_(self.eps)
        torch.div(exp_avg, grad, out=grad)
        master.mul_(keep).sub_(grad.mul_(rate))

    def fused(
        self, masters: list[Tensor], grads: list[Tensor], states: Sequence[list[Tensor]], scalars: Scalars
    ) -> None:
        """As `Optimizer.fused`."""
        exp_avgs, exp_avg_sqs = states
        beta1, beta2 = self.betas
        torch._fused_adamw_(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [scalars.number.float()] * len(masters),
            lr=scalars.lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=scalars.found_inf,
        )


@dataclass(frozen=True)
class _Batch:
    """Parts of pieces that one call of a fused kernel updates; `states` by state, then by part.

    `scratch` takes the widened gradients on a CPU, where mapping new memory costs more than the pass.
    """

    parts: list[Piece]
    states: list[list[Tensor]]
    scratch: list[Tensor]


class Updater:
    """Runs an optimizer over pieces. Holds the optimizer's states, flat, fp32, zero at the start.

    `compiled` turns the pass into one kernel with torch.compile (Triton on CUDA, C++ on a CPU). Both forms
    give the same values within rounding.
    """

    def __init__(self, pieces: Sequence[Piece], optimizer: Optimizer, compiled: bool) -> None:
        self.optimizer = optimizer
        self.pieces = list(pieces)
        self.states = [  # by piece, then by state
            [flat_zeros(len(piece.weight), torch.float32, piece.weight.device) for _ in optimizer.states]
            for piece in self.pieces
        ]
        self._on_host = self.pieces[0].weight.device.type == "cpu"
        self._batches = _batches(self.pieces, self.states, CHUNK if self._on_host else DEVICE_CHUNK)
        self._compiled: Callable[..., None] | None = None
        if compiled:
            # One kernel for all lengths: the pieces of a sharded optimizer are many and unequal. Under
            # dynamic=True the optimizer's constants would be loaded and converted for every vector.
            for piece, states in zip(self.pieces, self.states, strict=True):
                for tensor in (*piece.tensors(), *states):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            self._compiled = torch.compile(_whole if self._on_host else _predicated)

    def step(self, scalars: Scalars) -> None:
        """Apply one update to all pieces, or write nothing if `scalars.skip` is true."""
        if self._on_host and scalars.skip:  # reading the flag does not wait on a CPU
            return
        with torch.no_grad():
            if self._compiled is None:
                self._run_fused(scalars)
            else:
                scalars = replace(scalars, factors=self.optimizer.factors(scalars))
                for piece, states in zip(self.pieces, self.states, strict=True):
                    self._compiled(self.optimizer, piece, states, scalars)

    def _run_fused(self, scalars: Scalars) -> None:
        if not self._on_host:
            scalars = replace(scalars, lr=scalars.lr.float(), found_inf=scalars.skip.float())
        for batch in self._batches:
            _fused(self.optimizer, batch, scalars)

    def named_states(self, shards: Shards) -> dict[str, Tensor]:
        """fp32 values by `state/parameter`. A collective where they are sharded."""
        return {
            f"{state}/{name}": value
            for position, state in enumerate(self.optimizer.states)
            for name, value in shards.collect([states[position] for states in self.states]).items()
        }

    def load_states(self, shards: Shards, named: Mapping[str, Tensor]) -> None:
        """Take the states by `state/parameter`. Raises ValueError for those of another optimizer."""
        shapes = shards.shapes
        expected = {f"{state}/{name}": shapes[name] for state in self.optimizer.states for name in shapes}
        refuse_misfits("optimizer states", expected, named, torch.float32)
        for position, state in enumerate(self.optimizer.states):
            values = {name: named[f"{state}/{name}"] for name in shapes}
            shards.spread(values, [states[position] for states in self.states])

    def tensors(self) -> list[Tensor]:
        """All states."""
        return [state for states in self.states for state in states]


def _batches(pieces: Sequence[Piece], states: Sequence[list[Tensor]], chunk: int) -> list[_Batch]:
    """All elements in order, cut into batches of `chunk` elements."""
    batches: list[_Batch] = []
    room = 0
    on_host = pieces[0].weight.device.type == "cpu"
    scratch = torch.empty(min(chunk, sum(p.weight.numel() for p in pieces))) if on_host else None
    for piece, own in zip(pieces, states, strict=True):
        start, numel = 0, piece.weight.numel()
        while start < numel:
            if not room:
                batches.append(_Batch([], [[] for _ in own], []))
                room = chunk
            part = slice(start, min(start + room, numel))
            master = None if piece.master is None else piece.master[part]
            weight = piece.weight[part] if piece.half or master is None else master
            batches[-1].parts.append(Piece(weight, master, piece.grad[part]))
            for tensors, state in zip(batches[-1].states, own, strict=True):
                tensors.append(state[part])
            length = part.stop - start
            if scratch is not None:
                batches[-1].scratch.append(scratch[chunk - room : chunk - room + length])
            start, room = part.stop, room - length
    return batches


def _fused(optimizer: Optimizer, batch: _Batch, scalars: Scalars) -> None:
    """One batch by torch's fused kernel. In a skipped step half weights are rewritten unchanged."""
    grads = _widened(batch, scalars.multiplier)
    masters = [part.weight.float() if part.master is None else part.master for part in batch.parts]
    optimizer.fused(masters, grads, batch.states, scalars)
    halves = [(part.weight, m) for part, m in zip(batch.parts, masters, strict=True) if part.half]
    if halves:
        torch._foreach_copy_([weight for weight, _ in halves], [master for _, master in halves])


def _widened(batch: _Batch, multiplier: Tensor) -> list[Tensor]:
    """The clipped mean gradient, fp32, in separate memory."""
    if not batch.scratch:
        # A 1-dim factor: with a 0-dim fp32 one the product would be computed in fp16, and overflow.
        factor = multiplier.view(1)
        return [torch.mul(part.grad, factor) for part in batch.parts]
    for scratch, part in zip(batch.scratch, batch.parts, strict=True):
        scratch.copy_(part.grad)
        scratch.mul_(multiplier)
    return batch.scratch


def _whole(optimizer: Optimizer, piece: Piece, states: list[Tensor], scalars: Scalars) -> None:
    """The update as expressions for torch.compile. The step is known to be applied."""
    grad = piece.grad.float() * scalars.multiplier  # widened first: a product in fp16 would overflow
    master = piece.weight.float() if piece.master is None else piece.master
    optimizer.update(master, grad, states, scalars)
    if piece.half:
        piece.weight.copy_(master)


def _predicated(optimizer: Optimizer, piece: Piece, states: list[Tensor], scalars: Scalars) -> None:
    """The same without reading the skip flag on the host: a skipped step writes the old values back.

    For torch.compile, which keeps none of these copies in memory.
    """
    grad = piece.grad.float() * scalars.multiplier
    old = piece.weight.float() if piece.master is None else piece.master
    new = old.clone()
    moved = [state.clone() for state in states]
    optimizer.update(new, grad, moved, scalars)
    for state, after in zip(states, moved, strict=True):
        state.copy_(torch.where(scalars.skip, state, after))
    new = torch.where(scalars.skip, old, new)
    if piece.master is not None:
        piece.master.copy_(new)
    if piece.half:
        piece.weight.copy_(new)
