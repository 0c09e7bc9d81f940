"""When the collectives of a step are called, and that each is called once whatever fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launcher.engine import SGD, DDPOptions, Policy, Stepper
from tests.meta_device import META, MetaDevice, fake_group
from tests.shortage import NOWHERE, Shortage

LAYERS = 5  # a bucket each
NAMES = {"alltoall_base_": "exchange", "_allgather_base_": "gather", "allreduce_": "all-reduce"}


class Collectives(MetaDevice):
    """Notes them in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        self.seen.append(NAMES.get(name, name))
        return super()._communicate(func, args, kwargs)


def collectives_of(ddp: DDPOptions) -> tuple[list[str], list[str]]:
    """Within backward and within step, of a second step."""
    with fake_group(2) as group, Collectives() as device:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))).to(META)
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), group, ddp=ddp, reference_count=4, emulate=True)
        for _ in range(2):
            device.seen.clear()
            with stepper.forward():
                loss = model(torch.empty(4, 64, device=META)).float().square().sum()
            stepper.backward(loss, 4)
            number = len(device.seen)
            stepper.step()
    return device.seen[:number], device.seen[number:]


def test_a_sharded_bucket_is_exchanged_in_backward_and_its_weights_are_gathered_in_step() -> None:
    """One all-reduce for norms, statuses and counts together."""
    backward, step = collectives_of(DDPOptions(shard_optimizer=True, bucket_bytes=64 * 64 * 2))
    assert backward == ["exchange"] * LAYERS
    assert step == ["all-reduce", *["gather"] * LAYERS]


def test_nothing_is_sent_within_backward_without_overlap() -> None:
    backward, _ = collectives_of(DDPOptions(shard_optimizer=True, overlap=False))
    assert backward == []


@pytest.mark.slow
@pytest.mark.parametrize("ddp", [DDPOptions(), DDPOptions(shard_optimizer=True)], ids=["native", "sharded"])
def test_each_bucket_is_sent_and_gathered_once_wherever_memory_runs_out(ddp) -> None:
    """The other ranks wait for all."""
    ddp = DDPOptions(shard_optimizer=ddp.shard_optimizer, bucket_bytes=64 * 64 * 2)
    with fake_group(2) as group, Collectives() as device:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))).to(META)
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), group, ddp=ddp, reference_count=4, emulate=True)

        def collectives(at: int) -> tuple[list[str], bool]:
            device.seen.clear()
            with stepper.forward():
                loss = model(torch.empty(4, 64, device=META)).float().square().sum()
            try:
                with Shortage(at):
                    stepper.backward(loss, 4)
                    stepper.step()
            except torch.OutOfMemoryError:
                if not stepper.can_abandon:
                    return device.seen, False
                stepper.abandon()
            return list(device.seen), True

        expected, _ = collectives(NOWHERE)
        for at in range(1000):
            seen, abandoned = collectives(at)
            if not abandoned:
                break
            assert sorted(seen) == sorted(expected), at
    assert at > 3 * LAYERS
