"""When the reduced gradient is read on a CPU: while the next bucket is on its way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.engine import SGD, DDPOptions, Policy, Stepper
from launcher.engine.grads.collectives import AllReduceSum, ShardedSum
from launcher.engine.grads.grad_norm import SquaresReader
from tests.meta_device import fake_group

LAYERS = 4  # a bucket each, and one for their biases


def order_of(ddp: DDPOptions, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Waits for buckets and reads of a step, in order."""
    seen: list[str] = []
    for kind in (AllReduceSum, ShardedSum):
        waited = kind.wait

        def wait(self, bucket, waited=waited) -> None:
            waited(self, bucket)
            seen.append(f"bucket {bucket.index}")

        monkeypatch.setattr(kind, "wait", wait)
    read = SquaresReader.read
    monkeypatch.setattr(SquaresReader, "read", lambda self: (seen.append("read"), read(self))[1])
    with fake_group(2) as group:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), group, ddp=ddp, reference_count=4, emulate=True)
        with stepper.forward():
            loss = model(torch.full((4, 64), 0.25)).float().square().sum()
        stepper.backward(loss, 4)
        assert not stepper.step().read().skipped
    return seen


@pytest.mark.parametrize("shard", [False, True])
def test_each_bucket_is_read_as_soon_as_it_has_arrived(shard, monkeypatch) -> None:
    order = order_of(DDPOptions(bucket_bytes=64 * 64 * 2, shard_optimizer=shard), monkeypatch)
    expected = [(f"bucket {index}", "read") for index in range(LAYERS + 1)]
    assert order == [each for pair in expected for each in pair]
