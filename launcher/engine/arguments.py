"""Checks of a Stepper's arguments, and of attributes that are set on it afterwards.

Owns the errors for arguments of the wrong type, raised before anything reads them. `limits` has the rules for
numbers.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

import launcher.engine.limits as limits
from launcher.engine.errors import UnusableError, listed
from launcher.engine.flat.aliases import refuse_aliases
from launcher.engine.flat.groups import ParameterGroup
from launcher.engine.flat.names import named_buffers, named_parameters
from launcher.engine.precision.loss_scale import Scaling
from launcher.engine.precision.policy import Policy
from launcher.engine.wire.choice import Wire

SHOWN = 4  # modules that an error names
NEAR = 0.75  # similarity at which a subclass's new name counts as a misspelt argument; model_name has 0.67


KINDS = {
    "policy": (Policy, "Policy.fp16()"),
    "scaling": (Scaling, "Scaling(init=1024)"),
    "wire": (Wire, 'Wire(sum="fp32")'),
}


def refuse_kinds(
    model: object, optimizer: object, groups: object, given: Mapping[str, object], flags: Mapping[str, object]
) -> None:
    """Raise UnusableError for arguments of a Stepper of the wrong type. None means the default.

    `given` are those of KINDS by name, `flags` those that are True or False.
    """
    _refuse_optimizer(optimizer)
    if not isinstance(model, nn.Module):
        raise UnusableError(f"model={model!r}: it must be a torch.nn.Module.")
    _refuse_lazy(model)
    _refuse_inference(model)
    _refuse_sparse(model)
    refuse_aliases(named_parameters(model), named_buffers(model))
    for name, value in given.items():
        kind, example = KINDS[name]
        if not (value is None or isinstance(value, kind)):
            raise UnusableError(
                f"{name}={value!r}: it must be a {kind.__name__}, for example {example}, or None for the "
                "default."
            )
    for name, value in flags.items():
        if not (name == "emulate" and value is None):
            limits.flag.require(name, value)
    if not isinstance(groups, list | tuple) or not all(isinstance(each, ParameterGroup) for each in groups):
        raise UnusableError(
            f"groups={groups!r}: it must be a sequence of ParameterGroup, for example "
            '[ParameterGroup("*.bias", weight_decay=0.0)]. It names parameters by patterns and does not hold '
            "them, as torch's param_groups do."
        )


def _refuse_optimizer(optimizer: object) -> None:
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
    if group is None:
        group = dist.group.WORLD  # None if not initialised
    if group is None:
        return None
    if group == dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0
    ):
        raise UnusableError(
            f"rank {dist.get_rank()} is not a member of the group. Only the ranks that "
            "torch.distributed.new_group() was given may build a Stepper with it."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise UnusableError(
            f"group={group!r}: it must be a process group, for example one that "
            "torch.distributed.new_group() returned, or None for the default one."
        )
    return group if dist.get_world_size(group) > 1 else None


def _refuse_inference(model: nn.Module) -> None:
    """Raise UnusableError for tensors that autograd can never record, and where new ones would be such."""
    made = [name for name, p in model.named_parameters() if p.is_inference()]
    if made or torch.is_inference_mode_enabled():
        what = (
            f"{listed(made, SHOWN)} of {type(model).__name__} was made"
            if made
            else "a Stepper is being built"
        )
        raise UnusableError(
            f"{what} within torch.inference_mode(), whose tensors cannot be trained. Build the model and the "
            "Stepper outside it; torch.no_grad() has no such effect."
        )


def _refuse_lazy(model: nn.Module) -> None:
    """Raise UnusableError where parameters or buffers have no shape yet."""
    lazy = [name for name, value in [*model.named_parameters(), *model.named_buffers()] if is_lazy(value)]
    if lazy:
        raise UnusableError(
            f"{listed(lazy, SHOWN)} of {type(model).__name__} have no shape before the first forward pass. "
            "Run one forward pass, then build the Stepper."
        )


def _refuse_sparse(model: nn.Module) -> None:
    """Raise UnusableError for tensors that are not dense, and for embeddings whose gradients are not."""
    for name, value in [*named_parameters(model).items(), *named_buffers(model).items()]:
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            raise UnusableError(
                f"{name} of {type(model).__name__} is {value.dtype}, {value.layout}. Parameters and buffers "
                "must be dense: convert it with to_dense(), or keep it as a plain attribute of its module."
            )
    odd = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.weight.requires_grad
    ]
    if odd:
        raise UnusableError(
            f"{listed(odd, SHOWN)} of {type(model).__name__} has sparse=True, but gradients are reduced and "
            "applied in flat memory, which is dense. Build it with sparse=False."
        )


def rates_of(learning_rates: object, lr: float) -> list[float]:
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


def refuse_attribute(owner: object, base: type, parts: frozenset[str], name: str) -> None:
    """Raise AttributeError for an attribute of a built `owner` that nothing would read.

    `base` is the class whose constructor arguments may be meant, `parts` the attributes that it has set. A
    subclass may set what it declares, and new names that are not similar to an argument.
    """
    arguments = list(inspect.signature(base).parameters)
    known = ["lr", *arguments]
    derived = type(owner) is not base
    # 0.6 is difflib's own default.
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=NEAR if derived else 0.6)
    if derived and not (name in parts or hasattr(base, name)) and (hasattr(type(owner), name) or not nearest):
        return
    where = (
        f"Build another one with {name}=..."
        if name in arguments
        else f"Nearest: {nearest[0]}."
        if nearest
        else f"A Stepper is built with {', '.join(arguments)}."
    )
    raise AttributeError(f"stepper.{name} cannot be set; only lr can, once it is built. {where}")
