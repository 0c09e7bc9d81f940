"""Checks of a Stepper's arguments.

Owns the errors for arguments of the wrong type, raised before anything reads them, and for models that cannot
be trained. `limits` has the rules for numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from launcher.engine.errors import UnusableError, listed
from launcher.engine.grads.communication import DDPOptions
from launcher.engine.names import named_buffers, named_parameters
from launcher.engine.params.param_groups import ParameterGroup
from launcher.engine.precision.loss_scale import Scaling
from launcher.engine.precision.policy import Policy

SHOWN = 4  # modules that an error names


KINDS = {
    "policy": (Policy, "Policy.fp16()"),
    "scaling": (Scaling, "Scaling(init=1024)"),
    "ddp": (DDPOptions, "DDPOptions(shard_optimizer=True)"),
}


def check_types(model: object, optimizer: object, groups: object, given: Mapping[str, object]) -> None:
    """Raise UnusableError for arguments of a Stepper of the wrong type.

    `given` are those of KINDS by name, where None means the default.
    """
    _check_optimizer(optimizer)
    if not isinstance(model, nn.Module):
        raise UnusableError(f"model={model!r}: it must be a torch.nn.Module.")
    for name, value in given.items():
        kind, example = KINDS[name]
        if not (value is None or isinstance(value, kind)):
            raise UnusableError(
                f"{name}={value!r}: it must be a {kind.__name__}, for example {example}, or None."
            )
    if not isinstance(groups, list | tuple) or not all(isinstance(each, ParameterGroup) for each in groups):
        raise UnusableError(
            f"groups={groups!r}: it must be a sequence of ParameterGroup, for example "
            '[ParameterGroup("*.bias", weight_decay=0.0)], which names parameters and does not hold them.'
        )


def _check_optimizer(optimizer: object) -> None:
    """Raise UnusableError unless `optimizer` is one of the engine's.

    A torch optimizer already holds the parameters, whose memory and dtype a Stepper replaces.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise UnusableError(
            f"a {name} holds the parameters as they were before the Stepper. Pass its class and options: "
            f"TorchOptimizer(torch.optim.{name}, lr=...)."
        )
    if isinstance(optimizer, type) or not hasattr(optimizer, "lr"):
        name = optimizer.__name__ if isinstance(optimizer, type) else repr(optimizer)
        raise UnusableError(
            f"{name} is not an optimizer. Give SGD(lr), AdamW(lr), or TorchOptimizer(torch.optim.Adam, lr) "
            "for a class of torch.optim."
        )


def group_of(group: object) -> dist.ProcessGroup | None:
    """The group to train in: `group`, or the default one where it is None, as torch's modules do.

    Returns None for one process: if no group is initialised, and for a group of one. Raises UnusableError if
    `group` is not a process group, or if this rank is not a member of it.
    """
    group = dist.group.WORLD if group is None else group  # None if not initialised
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise UnusableError(
            f"group={group!r}: it must be a process group, for example one that "
            "torch.distributed.new_group() returned, or None for the default one."
        )
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise UnusableError(
            f"rank {dist.get_rank()} is not a member of the group. Only the ranks that "
            "torch.distributed.new_group() was given may build a Stepper with it."
        )
    return group if dist.get_world_size(group) > 1 else None


def check_model(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise UnusableError for a model that flat memory cannot hold, or whose training would go wrong."""
    kind = type(model).__name__
    if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules()):
        raise UnusableError(
            f"the {kind} is or has a DistributedDataParallel, which averages gradients that the Stepper then "
            "takes for those of one rank. A Stepper exchanges gradients itself: give it the module inside, "
            "wrapped.module, and do not wrap that afterwards."
        )
    tensors = [*named_parameters(model).items(), *named_buffers(model).items()]
    if lazy := [name for name, value in tensors if is_lazy(value)]:
        raise UnusableError(
            f"{listed(lazy, SHOWN)} of {kind} have no shape before the first forward pass. Run one forward "
            "pass, then build the Stepper."
        )
    kinds, modules = nn.Embedding | nn.EmbeddingBag, model.named_modules()
    embeddings = [(name or kind, each) for name, each in modules if isinstance(each, kinds)]
    if normed := [name for name, each in embeddings if each.max_norm is not None and group is not None]:
        raise UnusableError(
            f"{listed(normed, SHOWN)} of {kind} has max_norm, which rescales rows on one rank and not on the "
            "others, whose weights would differ then. Build it without max_norm, or train on one rank."
        )
    places: dict[tuple[torch.device, int], str] = {}
    for name, p in named_parameters(model).items():
        place = p.device, p.data_ptr()  # 0: it has no memory, as on meta
        if p.numel() and place[1] and (other := places.setdefault(place, name)) != name:
            raise UnusableError(
                f"{other} and {name} share memory through their data, and would be trained apart. Tie them "
                "by one object: head.weight = embedding.weight."
            )


def learning_rate_table(learning_rates: object, lr: float) -> list[float]:
    """The rates by applied step; `lr` alone if `learning_rates` is None."""
    if learning_rates is None:
        return [lr]
    if not isinstance(learning_rates, Iterable) or getattr(learning_rates, "ndim", 1) != 1:
        raise UnusableError(
            f"learning_rates={learning_rates!r}: it must be a sequence of numbers, one rate per applied "
            "step. For one rate throughout give it to the optimizer."
        )
    # A tensor's elements are tensors, which no rule takes for numbers.
    return learning_rates.tolist() if isinstance(learning_rates, torch.Tensor) else list(learning_rates)
