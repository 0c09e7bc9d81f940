"""Copies in host memory: the same bits, and later steps leave them alone."""

from __future__ import annotations

import pytest
import torch

from launcher.checkpoint.run_state import Snapshot, TrainProgress, identity_of, take_snapshot
from launcher.checkpoint.storage import load, publish
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, Policy, Stepper, TorchOptimizer
from tests.configs import composed
from tests.engine.observe import train
from tests.models import Odd, conv_net, features
from tests.snapshots import comparable

ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)


def taken(stepper: Stepper, step: int) -> Snapshot:
    identity = identity_of(composed(), stepper.model, 100)
    snapshot = take_snapshot(stepper, ALONE, identity, TrainProgress(0, step, step))
    assert snapshot is not None
    return snapshot


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
        snapshot = taken(stepper, step)
        train(stepper, *features(4, 10 + step, (3, 8, 8)))
        for part in ("weights", "optimizer", "buffers"):
            assert comparable(getattr(snapshot.engine, part)) == comparable(getattr(state, part)), part
        found = load(publish(tmp_path, snapshot)).engine
        assert comparable(found.weights) == comparable(state.weights)
        assert all(tensor.is_contiguous() for tensor in found.weights.values())


def test_frozen_tied_and_mixed_parameters_are_kept() -> None:
    stepper = Stepper(Odd(), AdamW(0.01))
    snapshot = taken(stepper, 0)
    assert comparable(snapshot.engine.weights) == comparable(stepper.state().weights)
