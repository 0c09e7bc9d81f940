"""Copies in host memory: the same bits, and later steps leave them alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from launcher.checkpoint.host_memory import HostCopies
from launcher.checkpoint.run_state import (
    PendingSnapshot,
    RunExtras,
    Snapshot,
    TrainProgress,
    begin_snapshot,
    identity_of,
)
from launcher.checkpoint.storage import load, publish
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, Policy, Stepper, TorchOptimizer
from tests.configs import composed
from tests.engine.observe import train
from tests.models import Odd, conv_net, features
from tests.snapshots import comparable

ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)


def odd_tensors() -> dict[str, Tensor]:
    """Views of one memory, in and out of order, of other strides, without elements, of several dtypes."""
    flat = torch.randn(1000)
    return {
        "late": flat[500:900].view(20, 20),
        "early": flat[3:10],
        "overlapping": flat[0:600],
        "transposed": flat[100:112].view(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 5),
        "empty half": torch.zeros(0).half(),
        "half": torch.randn(7).half(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "same bits as ints": flat.view(torch.int32)[7:9],
    }


def test_values_shapes_and_strides_are_kept() -> None:
    tensors = odd_tensors()
    copies = HostCopies(torch.device("cpu"))
    copied = copies.copy(tensors)
    copies.wait()
    assert list(copied) == list(tensors)
    for name, tensor in tensors.items():
        assert comparable(copied[name]) == comparable(tensor), name
        assert name == "expanded" or copied[name].stride() == tensor.stride(), name
        assert not tensor.numel() or copied[name].data_ptr() != tensor.data_ptr()


def finished(pending: PendingSnapshot | None, stepper: Stepper, step: int) -> Snapshot:
    assert pending is not None
    identity = identity_of(composed(), stepper.model, 100)
    return pending.finish(identity, TrainProgress(0, step, step), None, RunExtras())


def states() -> dict[str, Stepper]:
    def build(policy: Policy, optimizer=None, model=None) -> Stepper:
        model = (model or conv_net()).to(memory_format=torch.channels_last)
        return Stepper(model, optimizer or AdamW(0.01), policy, reference_count=4)

    return {
        "fp16": build(Policy.fp16()),
        "fp32": build(Policy.fp32(), SGD(0.1, 0.9)),
        "pure_fp16": build(Policy.pure_fp16()),
        "amp_bf16": build(Policy.amp_bf16()),
        "torch's Adam": build(Policy.fp16(), TorchOptimizer(torch.optim.Adam, 0.01)),
    }


@pytest.mark.parametrize("kind", states())
def test_a_snapshot_holds_the_bits_of_the_state_and_later_steps_leave_it_alone(tmp_path, kind) -> None:
    stepper = states()[kind]
    for step in range(1, 4):
        train(stepper, *features(4, step, (3, 8, 8)))
        state = stepper.state().clone()
        pending = begin_snapshot(stepper, None, ALONE)
        train(stepper, *features(4, 10 + step, (3, 8, 8)))
        snapshot = finished(pending, stepper, step)
        for part in ("weights", "optimizer", "buffers"):
            assert comparable(getattr(snapshot.engine, part)) == comparable(getattr(state, part)), part
        found = load(publish(tmp_path, snapshot)).engine
        assert comparable(found.weights) == comparable(state.weights)
        assert all(tensor.is_contiguous() for tensor in found.weights.values())


def test_frozen_tied_and_mixed_parameters_are_kept() -> None:
    stepper = Stepper(Odd(), AdamW(0.01))
    snapshot = finished(begin_snapshot(stepper, None, ALONE), stepper, 0)
    assert comparable(snapshot.engine.weights) == comparable(stepper.state().weights)
