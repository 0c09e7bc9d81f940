"""Copies in host memory: the same bits as tensor by tensor, in few copies, in memory that is used again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.checkpoint.host_memory import PinnedStagingBuffer
from launcher.checkpoint.run_state import RunExtras, RunIdentity, SavedWith, TrainProgress, stage
from launcher.checkpoint.storage import load, publish
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, Policy, Stepper, TorchOptimizer
from tests.configs import composed
from tests.engine.observe import train
from tests.models import Odd, conv_net, features
from tests.snapshots import comparable

ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)


class Copies(TorchDispatchMode):
    """Counts copies between tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


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
    copies = PinnedStagingBuffer().copy(tensors)
    copies.wait()
    assert list(copies.tensors) == list(tensors)
    for name, tensor in tensors.items():
        copied = copies.tensors[name]
        assert comparable(copied) == comparable(tensor), name
        assert copied.stride() == tensor.stride(), name
        assert not tensor.numel() or copied.data_ptr() != tensor.data_ptr()


def test_the_memory_is_used_again_and_grows() -> None:
    memory = PinnedStagingBuffer()
    first = memory.copy({"a": torch.ones(1000)})
    second = memory.copy({"a": torch.full((1000,), 2.0)})
    assert second.tensors["a"].data_ptr() == first.tensors["a"].data_ptr()
    assert first.tensors["a"][0] == 2
    assert memory.copy({"a": torch.ones(2000)}).tensors["a"].sum() == 2000


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
    """On the road that a GPU takes: flat pieces, cut on the host."""
    stepper, memory = states()[kind], PinnedStagingBuffer()
    identity = RunIdentity.of(composed(), stepper.model, 100)
    for step in range(1, 4):
        train(stepper, *features(4, step, (3, 8, 8)))
        state = stepper.state().clone()
        with Copies() as copies:
            staged = stage(
                stepper,
                ALONE,
                identity,
                SavedWith(1, "none"),
                TrainProgress(0, step, step),
                None,
                RunExtras(),
                memory,
            )
        assert staged is not None
        if kind != "torch's Adam":  # whose states are as many tensors
            assert copies.number < 12, "two segments, weights and states, and what buffers take"
        train(stepper, *features(4, 10 + step, (3, 8, 8)))
        snapshot = staged.finish()
        for part in ("weights", "optimizer", "buffers"):
            assert comparable(getattr(snapshot.engine, part)) == comparable(getattr(state, part)), part
        found = load(publish(tmp_path, snapshot)).engine
        assert comparable(found.weights) == comparable(state.weights)
        assert all(tensor.is_contiguous() for tensor in found.weights.values())


def test_frozen_tied_and_mixed_parameters_are_kept() -> None:
    stepper = Stepper(Odd(), AdamW(0.01))
    staged = stage(
        stepper,
        ALONE,
        RunIdentity.of(composed(), stepper.model, 100),
        SavedWith(1, "none"),
        TrainProgress(0, 0, 0),
        None,
        RunExtras(),
        PinnedStagingBuffer(),
    )
    assert staged is not None
    assert comparable(staged.finish().engine.weights) == comparable(stepper.state().weights)
