"""The option `model.sync_bn`: BatchNorm statistics over the samples of all ranks, by torch's SyncBatchNorm.

Owns what is checked before the conversion, because torch would hang or drop an operation without an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.data.batch_plan import BatchPlan
from launcher.distributed.env import WorkerEnv
from launcher.engine.names import named_modules
from launcher.errors import ConfigError

CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def synchronised(model: nn.Module, env: WorkerEnv, plan: BatchPlan) -> nn.Module:
    """`model` with its batch norms replaced by nn.SyncBatchNorm, which share parameters and buffers.

    Raises ConfigError for ranks with different numbers of forward passes, and for a batch norm of a custom
    class: torch would replace it too, and drop what the class adds (an activation in timm's).
    """
    refuse_uneven_micro_batches(plan)
    for name, module in named_modules(model):
        if isinstance(module, _BatchNorm) and type(module) not in CONVERTED:
            raise ConfigError(
                f"model.sync_bn=true: {name or 'the model'} is a {type(module).__name__}, whose arithmetic "
                "is unknown here. Use nn.BatchNorm1d, 2d or 3d, or set model.sync_bn=false."
            )
    convert: Callable[..., nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm  # torch has no types for it
    return convert(model, env.group)


def refuse_uneven_micro_batches(plan: BatchPlan) -> None:
    """Raise ConfigError if ranks run different numbers of forward passes, each of which is a collective."""
    plans = [dataclasses.replace(plan, rank=rank) for rank in range(plan.world_size)]
    for step in {0, plan.steps_per_epoch - 1}:  # all other steps are as large as the first
        passes = [len(each.micro_positions(step)) for each in plans]
        if len(set(passes)) > 1:
            raise ConfigError(
                "model.sync_bn=true needs equally many micro-batches on all ranks, but the "
                f"{len(plan.global_batch(step))} samples of step {step + 1} of an epoch make {passes}. "
                "Choose another data.batch_size or data.micro_batch_size, or set data.drop_last=true."
            )
