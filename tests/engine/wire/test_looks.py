"""When the reduced gradient is read: before the last bucket has arrived, if the processor waits for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.engine import SGD, Policy, Stepper, Wire
from launcher.engine.wire.grad_norm import ReadSums
from launcher.engine.wire.transports import NativeSum, ShardedSum
from tests.meta_device import fake_group

LAYERS = 4  # a bucket each, and one for their biases


def order_of(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Waits for buckets and reads of a step, in order."""
    seen: list[str] = []
    for kind in (NativeSum, ShardedSum):
        waited = kind.wait

        def wait(self, bucket, waited=waited) -> None:
            waited(self, bucket)
            seen.append(f"bucket {bucket.index}")

        monkeypatch.setattr(kind, "wait", wait)
    with fake_group(2) as group:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), group, wire=wire, reference_count=4, emulate=True)
        for bucket in stepper.reducer.buckets:
            if bucket.reads_reduced is not None:
                bucket.reads_reduced = recording(bucket.reads_reduced, seen)
        with stepper.forward():
            loss = model(torch.full((4, 64), 0.25)).float().square().sum()
        stepper.backward(loss, 4)
        assert not stepper.step().read().skipped
    return seen


def recording(sums: ReadSums, seen: list[str]) -> ReadSums:
    def read() -> torch.Tensor:
        seen.append("read")
        return sums()

    return read


@pytest.mark.parametrize("shard", [False, True])
def test_only_the_last_bucket_of_matrices_is_read_after_it_has_arrived(shard, monkeypatch) -> None:
    order = order_of(Wire(bucket_bytes=64 * 64 * 2, shard=shard), monkeypatch)
    first = [f"bucket {index}" for index in range(LAYERS - 1)]
    assert order == [*first, "read", f"bucket {LAYERS - 1}", "read", f"bucket {LAYERS}", "read"]
