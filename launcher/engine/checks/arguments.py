"""Checks of a Stepper's arguments.

Owns the errors for optimizers, groups and models that cannot be trained, raised before anything is built.
`limits` has the rules for numbers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from launcher.engine.errors import UnusableError, listed
from launcher.engine.names import named_buffers, named_parameters

SHOWN = 4  # modules that an error names


def check_optimizer(optimizer: object) -> None:
    """Raise UnusableError for an optimizer of torch: it holds parameters whose memory a Stepper replaces."""
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise UnusableError(
            f"a {name} holds the parameters as they were before the Stepper. Pass its class and options: "
            f"TorchOptimizer(torch.optim.{name}, lr=...)."
        )


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to train in: `group`, or the default one where it is None, as torch's modules do.

    Returns None for one process: if no group is initialised, and for a group of one. Raises UnusableError if
    this rank is not a member of it.
    """
    group = dist.group.WORLD if group is None else group  # None if not initialised
    if group is None:
        return None
    if dist.get_rank(group) < 0:
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
