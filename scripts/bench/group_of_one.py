"""A process group of one rank whose Steppers run their collectives, to measure a rank without others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

import launcher.engine.stepper as stepper_module


@contextlib.contextmanager
def collectives_of_one(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A default group of one whose Steppers run their collectives, as one GPU can.

    A Stepper otherwise treats a group of one as no group.
    """
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    own = vars(stepper_module)
    chosen, own["group_of"] = own["group_of"], lambda group: group
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        own["group_of"] = chosen
        dist.destroy_process_group()
