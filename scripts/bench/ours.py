"""The engine's training step behind the interface of the baselines."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.engine import SGD, AdamW, Policy, Scaling, Stepper, StepResult
from scripts.bench.baselines import OPTIONS, Batch, Setup, Step

OPTIMIZERS = {"adamw": AdamW(**OPTIONS["adamw"]), "sgd": SGD(**OPTIONS["sgd"])}


def stepper_for(model: nn.Module, setup: Setup, policy: str = "fp16", **options: Any) -> Stepper:
    """A Stepper for a setup; `options` are its keyword arguments, such as `wire` and `emulate`.

    Without `setup.scaled` it has the policy's own loss scale. Among several ranks it has a group of its own
    unless one is given: Steppers that share one send nothing before their backward passes have ended, and a
    run has only one. All ranks must then call this together.
    """
    if dist.is_initialized() and "group" not in options:
        options["group"] = dist.new_group()
    model = setup.laid_out(model.to(setup.device))
    scaling = Scaling("dynamic", init=setup.init_scale) if setup.scaled else None
    return Stepper(model, OPTIMIZERS[setup.optimizer], Policy.named(policy), scaling=scaling, **options)


class Mean(NamedTuple):
    """A mean that is computed when it is asked for: the peers' loss functions return one, ours a sum."""

    total: Tensor
    count: int

    def __float__(self) -> float:
        return float(self.total) / self.count


def step_with(stepper: Stepper) -> Step:
    """A step with the whole of its bookkeeping. As the launcher, it reads each report one step late."""
    waiting: list[StepResult] = []

    def step(batch: Batch) -> Mean:
        inputs, labels = batch
        with stepper.forward():
            loss = F.cross_entropy(stepper.model(inputs).float(), labels, reduction="sum")
        stepper.backward(loss, len(labels))
        waiting.append(stepper.step())
        if len(waiting) > 1:
            waiting.pop(0).read()
        return Mean(loss.detach(), len(labels))

    return step


def ours(model: nn.Module, setup: Setup, policy: str = "fp16", **options: Any) -> Step:
    """A step of `stepper_for` the same arguments."""
    return step_with(stepper_for(model, setup, policy, **options))
