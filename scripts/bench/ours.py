"""The engine's training step behind the interface of the baselines."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from launcher.engine import SGD, AdamW, Policy, Scaling, Stepper, StepResult
from scripts.bench.baselines import OPTIONS, Batch, Setup, Step

OPTIMIZERS = {"adamw": AdamW(**OPTIONS["adamw"]), "sgd": SGD(**OPTIONS["sgd"])}


def ours(
    model: nn.Module,
    setup: Setup,
    policy: str = "fp16",
    *,
    emulate: bool | None = None,
    compiled: bool = False,
) -> Step:
    """A step with the whole of its bookkeeping. As the launcher, it reads each report one step late.

    Without `setup.scaled` it has the policy's own loss scale.
    """
    model = setup.laid_out(model.to(setup.device))
    scaling = Scaling("dynamic", init=setup.init_scale) if setup.scaled else None
    stepper = Stepper(
        model,
        OPTIMIZERS[setup.optimizer],
        Policy.named(policy),
        scaling=scaling,
        emulate=emulate,
        compiled=compiled,
    )
    waiting: list[StepResult] = []

    def step(batch: Batch) -> Tensor:
        inputs, labels = batch
        with stepper.forward():
            loss = F.cross_entropy(model(inputs).float(), labels, reduction="sum")
        stepper.backward(loss, len(labels))
        waiting.append(stepper.step())
        if len(waiting) > 1:
            waiting.pop(0).read()
        return loss.detach() / len(labels)

    return step
