"""The optimizers of the engine, SGD and AdamW: their options and their call of torch's fused kernel.

SGD with (Nesterov) momentum: Sutskever et al. 2013, as `torch.optim.SGD` without dampening.
AdamW: Loshchilov and Hutter 2019, as `torch.optim.AdamW`.
`update.Updater` runs them over flat memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

import launcher.engine.limits as limits
from launcher.engine.errors import UnusableError


class KernelScalars(NamedTuple):
    """What one call of a fused kernel needs besides the buffers.

    `lr`: a number, or fp32 on a GPU, which reads it there. `applied`: the count of applied steps, this one
    included, a number or 0-dim. `found_inf`: fp32, 0-dim; 1 forbids writing; None where the step is known to
    be applied.
    """

    lr: float | Tensor
    applied: float | Tensor
    found_inf: Tensor | None


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as torch.optim.SGD; weight decay is added to the gradient.

    `lr` is per applied step; a Stepper's `learning_rates` and `lr` replace it. Raises UnusableError.
    A parameter without a gradient is updated with a zero gradient: weight decay and momentum still move it,
    unlike under DistributedDataParallel.
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

    def update(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        states: Sequence[list[Tensor]],
        scalars: KernelScalars,
    ) -> None:
        """Update `masters` and `states` (by state, then by tensor) in place; `grads` are the mean, fp32."""
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
    A parameter without a gradient is updated with a zero gradient: weight decay and momentum still move it,
    unlike under DistributedDataParallel.
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

    def update(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        states: Sequence[list[Tensor]],
        scalars: KernelScalars,
    ) -> None:
        """Update `masters` and `states` in place; see `SGD.update`."""
        exp_avgs, exp_avg_sqs = states
        beta1, beta2 = self.betas
        applied = torch.as_tensor(scalars.applied, dtype=torch.float32)
        torch._fused_adamw_(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],  # max_exp_avg_sqs, of amsgrad only
            [applied] * len(masters),
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
