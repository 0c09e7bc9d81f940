"""Exchange, sum, gather: on a GPU a bucket's second stage follows within backward, in one fixed order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launcher.engine import SGD, Policy, Stepper, Wire
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


def collectives_of(wire: Wire) -> tuple[list[str], list[str]]:
    """Within backward and within step, of a second step."""
    with fake_group(2) as group, Collectives() as device:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))).to(META)
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), group, wire=wire, reference_count=4, emulate=True)
        for _ in range(2):
            device.seen.clear()
            with stepper.forward():
                loss = model(torch.empty(4, 64, device=META)).float().square().sum()
            stepper.backward(loss, 4)
            number = len(device.seen)
            stepper.step()
    return device.seen[:number], device.seen[number:]


def test_a_bucket_is_gathered_as_soon_as_the_next_one_is_sent() -> None:
    backward, step = collectives_of(Wire(sum="fp32", bucket_bytes=64 * 64 * 2))
    assert backward == ["all-reduce", "exchange", *(["exchange", "gather"] * (LAYERS - 2))]
    assert step == ["exchange", "gather", "gather"]


def test_a_sharded_bucket_is_exchanged_in_backward_and_its_weights_are_gathered_in_step() -> None:
    """One all-reduce for norms, marks and counts together."""
    backward, step = collectives_of(Wire(shard=True, bucket_bytes=64 * 64 * 2))
    assert backward == ["exchange"] * (LAYERS - 1)
    assert step == ["exchange", "all-reduce", *["gather"] * LAYERS]


@pytest.mark.parametrize("wire", [Wire(sum="fp32"), Wire(shard=True)], ids=["fp32 sums", "sharded"])
def test_nothing_follows_within_backward_without_overlap(wire) -> None:
    backward, _ = collectives_of(Wire(sum=wire.sum, shard=wire.shard, overlap=False))
    assert backward == []


@pytest.mark.parametrize(
    "wire", [Wire(), Wire(sum="fp32"), Wire(shard=True)], ids=["native", "fp32", "sharded"]
)
def test_each_bucket_is_sent_and_gathered_once_wherever_memory_runs_out(wire) -> None:
    """As on a GPU, with the second stage within the backward pass. The other ranks wait for all."""
    wire = Wire(sum=wire.sum, shard=wire.shard, bucket_bytes=64 * 64 * 2)
    with fake_group(2) as group, Collectives() as device:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))).to(META)
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), group, wire=wire, reference_count=4, emulate=True)

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
