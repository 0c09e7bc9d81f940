"""What one rank of thousands does in a step: the calls do not grow with the number of ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from launcher.engine import SGD, DDPOptions, Policy, Stepper
from tests.meta_device import fake_group

WIRES = {"native": DDPOptions(), "sharded": DDPOptions(shard_optimizer=True)}


def calls_of_a_step(ddp: DDPOptions, world_size: int) -> int:
    """Calls of functions, built-in ones included, in backward(), step() and read()."""
    with fake_group(world_size) as group:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), group, ddp=ddp, reference_count=4, emulate=True)
        for _ in range(2):
            with stepper.forward():
                loss = model(torch.full((4, 16), 0.25)).float().square().sum()
            number = 0

            def count(frame: Any, event: str, arg: object) -> None:
                nonlocal number
                number += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                stepper.backward(loss, 4)
                stepper.step().read()
            finally:
                sys.setprofile(None)
    return number


@pytest.mark.parametrize("ddp", WIRES.values(), ids=WIRES)
def test_a_step_on_thousands_of_ranks_makes_hardly_more_calls_than_on_eight(ddp) -> None:
    few, many = calls_of_a_step(ddp, 8), calls_of_a_step(ddp, 4096)
    assert many < few + 150, (few, many)
