"""The optimizers of the engine: SGD and AdamW.

Owns their arithmetic, each in two forms: tensor expressions that torch.compile fuses into one kernel, and
calls of torch's fused kernel. Both compute the same values within rounding. `updater` runs them over memory.

SGD with (Nesterov) momentum: Sutskever et al. 2013, in the form of `torch.optim.SGD` without dampening.
AdamW: Loshchilov and Hutter 2019, in the form of `torch.optim.AdamW`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

import launcher.engine.limits as limits
from launcher.engine.errors import UnusableError


@dataclass(frozen=True)
class Scalars:
    """What one update needs besides the buffers: 0-dim tensors on the device, or numbers of the host.

    `multiplier` turns the wire gradient into the clipped mean gradient; `number` is the count of applied
    steps, this one included; `skip` forbids writing. `factors` are those of the optimizer, fp32. `found_inf`
    is `skip` as a fused kernel reads it, fp32; None where the step is known to be applied. `weight_decay`
    replaces the optimizer's. To compute the factors of all groups at once, it and `lr` are [groups]. `narrow`
    are rate, number and `skip` in fp32, where they are at hand.
    """

    multiplier: Tensor | float  # fp32
    lr: Tensor | float  # fp64
    number: Tensor | float
    skip: Tensor | bool
    factors: tuple[Tensor, ...] = ()
    found_inf: Tensor | None = None
    weight_decay: Tensor | None = None  # fp64
    narrow: tuple[Tensor, Tensor, Tensor] | None = None

    def for_fused_kernel(self, wide_rate: bool) -> Scalars:
        """The same with rate, number and skip flag as a fused kernel reads them: on a CPU a `wide_rate`."""
        own = self.narrow or tuple(tensor_of(each).float() for each in (self.lr, self.number, self.skip))
        return replace(self, lr=self.lr if wide_rate else own[0], number=own[1], found_inf=own[2])

    def on(self, device: torch.device) -> Scalars:
        """The same as tensors: torch.compile takes a number for a constant, and compiles for each."""
        return replace(
            self,
            multiplier=torch.as_tensor(self.multiplier, dtype=torch.float32, device=device),
            lr=torch.as_tensor(self.lr, dtype=torch.float64, device=device),
            number=torch.as_tensor(self.number, dtype=torch.float64, device=device),
            skip=torch.as_tensor(self.skip, dtype=torch.bool, device=device),
        )


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as torch.optim.SGD; weight decay is added to the gradient.

    `lr` is per applied step; a Stepper's `learning_rates` and `lr` replace it. Raises UnusableError.
    A parameter without a gradient is updated with a zero gradient (see Stepper).
    """

    lr: Annotated[float, limits.rate]
    momentum: Annotated[float, limits.share] = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, limits.not_negative] = 0.0

    def __post_init__(self) -> None:
        limits.require_fields(self, "SGD")
        if self.nesterov and not self.momentum:
            raise UnusableError("SGD nesterov=True: it needs momentum above 0.")

    @property
    def states(self) -> tuple[str, ...]:
        """`momentum`, fp32 and as many elements as the parameter; none where momentum is 0."""
        return ("momentum",) if self.momentum else ()

    def factors(self, scalars: Scalars) -> tuple[Tensor, ...]:
        """The rate, and the weight decay where groups differ in it: one kernel then serves them all."""
        lr = tensor_of(scalars.lr).float()
        return (lr,) if scalars.weight_decay is None else (lr, scalars.weight_decay.float())

    def update(self, master: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
        """Update `master` and `states` in place; `grad` (fp32, the clipped mean) may be overwritten."""
        lr, *weight_decay = scalars.factors
        if weight_decay:
            grad.addcmul_(master, weight_decay[0])
        elif self.weight_decay:
            grad.add_(master, alpha=self.weight_decay)
        if self.momentum:
            (momentum,) = states
            momentum.mul_(self.momentum).add_(grad)
            if self.nesterov:
                grad.add_(momentum, alpha=self.momentum)
            else:
                grad.copy_(momentum)
        master.sub_(grad.mul_(lr))

    def fused(
        self, masters: list[Tensor], grads: list[Tensor], states: Sequence[list[Tensor]], scalars: Scalars
    ) -> None:
        """The same with torch's fused kernel, for several tensors; `states` by state, then by tensor.

        On CUDA the kernel takes the rate in fp32 and reads it, the number and the verdict on the device.
        """
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

    lr: Annotated[float, limits.rate]
    betas: Annotated[tuple[float, float], limits.two_shares] = (0.9, 0.999)
    eps: Annotated[float, limits.positive] = 1e-8  # at 0 a gradient that stays zero gives 0 / 0
    weight_decay: Annotated[float, limits.not_negative] = 0.01

    def __post_init__(self) -> None:
        limits.require_fields(self, "AdamW")

    @property
    def states(self) -> tuple[str, ...]:
        """Means of the gradient and of its square, fp32 and as many elements as the parameter each."""
        return ("exp_avg", "exp_avg_sq")

    def factors(self, scalars: Scalars) -> tuple[Tensor, ...]:
        """Decay factor of the weights, bias-corrected rate, and bias correction of the square root."""
        beta1, beta2 = self.betas
        # In fp64: of 1 - beta2 in the first steps fp32 would keep about four digits.
        lr, number = tensor_of(scalars.lr), tensor_of(scalars.number).double()
        correction1 = 1 - beta1**number
        correction2 = 1 - beta2**number
        weight_decay = self.weight_decay if scalars.weight_decay is None else scalars.weight_decay
        keep = 1 - lr * weight_decay
        return keep.float(), (lr / correction1).float(), correction2.rsqrt().float()

    def update(self, master: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Scalars) -> None:
        """Update `master` and `states` in place; see `SGD.update`."""
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
        """Update with torch's fused kernel; see `SGD.fused`."""
        exp_avgs, exp_avg_sqs = states
        beta1, beta2 = self.betas
        torch._fused_adamw_(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],  # max_exp_avg_sqs, of amsgrad only
            [_steps(scalars.number)] * len(masters),
            lr=scalars.lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=scalars.found_inf,
        )


Optimizer = SGD | AdamW


def tensor_of(number: Tensor | float) -> Tensor:
    """One of the Scalars that is known to be on the device."""
    assert isinstance(number, Tensor)
    return number


def _steps(number: Tensor | float) -> Tensor:
    """The count of applied steps as torch's fused kernel takes it: fp32, 0-dim."""
    return number.float() if isinstance(number, Tensor) else torch.full((), number, dtype=torch.float32)
