"""The parts of a Stepper, and the order in which they are built.

Owns what is decided once, before the first step. All ranks run the same lines, because some parts
communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from torch import nn

import launcher.engine.async_work as async_work
import launcher.engine.limits as limits
from launcher.engine.checks.attached_params import AttachedParams, InPlaceWrites
from launcher.engine.checks.ported_loop import PortedLoop
from launcher.engine.checks.step_warnings import StepWarnings
from launcher.engine.errors import UnusableError
from launcher.engine.grads.collectives import DDPOptions, ShardedSum, choose_collectives
from launcher.engine.grads.reducer import Reducer
from launcher.engine.grads.step_totals import TotalsReducer
from launcher.engine.grads.zero1 import Zero1
from launcher.engine.optim.torch_optimizer import AnyOptimizer, check_adaptable, updater_of
from launcher.engine.params.flat_params import Layout
from launcher.engine.params.module_buffers import Buffers
from launcher.engine.params.param_groups import Grouping, ParameterGroup
from launcher.engine.precision.found_inf import ON_DEVICE, ON_HOST
from launcher.engine.precision.loss_scale import LossScale, Scaling
from launcher.engine.precision.outliers import OutlierStatistics, SkipOutliers
from launcher.engine.precision.policy import Policy, choose_emulation
from launcher.engine.rank_state import RankState
from launcher.engine.step_timer import StepClock

MAY_DIFFER = ("micro_batches", "emulate")  # between ranks: checks/same_on_all_ranks says why


@dataclass(frozen=True)
class StepperOptions:
    """The arguments of a Stepper, with defaults filled in. Raises UnusableError for a number out of range."""

    policy: Policy
    ddp: DDPOptions
    scaling: Scaling
    clip_norm: Annotated[float, limits.positive] | None
    optimizer: AnyOptimizer
    learning_rates: Sequence[float]
    groups: Sequence[ParameterGroup]
    reference_count: Annotated[int, limits.a_reference_count] | None
    micro_batches: Annotated[int, limits.at_least_one]
    emulate: bool | None
    skip_outliers: SkipOutliers | None

    def __post_init__(self) -> None:
        limits.require_fields(self)
        if not self.learning_rates:
            raise UnusableError("learning_rates is empty: it must hold at least one rate.")
        for step, rate in enumerate(self.learning_rates):
            limits.rate.require(f"learning rate of applied step {step}", rate)

    def shared(self) -> dict[str, object]:
        """The options that must be equal on all ranks, by name."""
        return {name: value for name, value in vars(self).items() if name not in MAY_DIFFER}


def decides_on_host(device: torch.device) -> bool:
    """Whether the host reads a step's numbers; else they stay on the device, and no step waits for it."""
    return device.type == "cpu"


class StepperParts:
    """The parts of a Stepper, each built from those before it. A collective with a group.

    Moves the model's parameters and buffers into flat memory and broadcasts rank 0's values.
    """

    def __init__(self, model: nn.Module, options: StepperOptions, group: async_work.Group) -> None:
        policy, ddp, optimizer = options.policy, options.ddp, options.optimizer
        world_size = dist.get_world_size(group) if group else 1
        grouping = Grouping.of(model, options.groups)
        # Before the layout moves the parameters: a refused model is unchanged.
        check_adaptable(optimizer, model, grouping, policy, ddp.shard_optimizer and world_size > 1)
        self.layout = layout = Layout(
            model, policy, ddp.gradient_dtype, world_size, ddp.bucket_bytes, grouping
        )
        # One contract, two places for a step's numbers: on a CPU the host reads them, which costs less.
        self.on_host = on_host = decides_on_host(layout.device)
        self.buffers = Buffers(model, group)
        # Once all is in flat memory: one broadcast per flat buffer instead of one per parameter.
        _take_values_of_rank_0(layout, model, self.buffers, group)
        self.emulation = choose_emulation(policy, layout.device, options.emulate)
        collectives, self.predivide_factor = choose_collectives(ddp, layout, group)
        self.reducer = Reducer(layout, group, collectives, options.micro_batches, ddp.overlap)
        sharded = [
            isinstance(collectives[each.name], ShardedSum)
            for each in layout.flat_buffers
            for _ in each.params
        ]
        self.totals = TotalsReducer(on_host, layout.device, group, sharded)
        self.attached_params = AttachedParams(model)
        # Before the updater, InPlaceWrites and RankState, which hold its shards; it drops the full masters.
        self.zero1 = Zero1(layout, collectives, group)
        self.updater = updater_of(optimizer, model, layout, self.zero1)
        self.in_place = InPlaceWrites(layout, self.zero1)
        self.scale = LossScale(options.scaling, None if on_host else layout.device)
        self.outliers: OutlierStatistics | None = None
        if options.skip_outliers is not None:
            self.outliers = OutlierStatistics(options.skip_outliers, layout.device, on_host)
        self.operations = ON_HOST if on_host else ON_DEVICE
        self.clock = StepClock(layout.device)
        self.names = [param.name for param in layout.params]
        self.warnings = StepWarnings(sum(param.numel > 0 for param in layout.params), self.reducer.unused)
        clips = options.clip_norm is not None
        self.ported_loop = PortedLoop(layout.parameters.values(), group, clips, self.warnings)
        self.rank_state = RankState(
            model, layout, self.buffers, self.zero1, self.updater, self.scale, self.outliers
        )


def _take_values_of_rank_0(
    layout: Layout, model: nn.Module, buffers: Buffers, group: async_work.Group
) -> None:
    """Broadcast parameters, including frozen ones, and buffers, bit for bit."""
    if group is None:
        return
    exact = [
        flat_buffer.weight if flat_buffer.master is None else flat_buffer.master
        for flat_buffer in layout.flat_buffers
    ]
    frozen = [p.detach() for p in model.parameters() if not p.requires_grad]
    for tensor in (*exact, *frozen, *buffers.flat):
        values = tensor.contiguous()
        # As bytes: Gloo has no integers of 16 bits, for one.
        async_work.broadcast(values.reshape(-1).view(torch.uint8), group)
        tensor.copy_(values)
    for flat_buffer in layout.flat_buffers:
        if flat_buffer.half and flat_buffer.master is not None:
            flat_buffer.weight.copy_(flat_buffer.master)
