"""Replicas that drift apart are caught at the next comparison, with the rank and the tensor."""

from __future__ import annotations

import math

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.engine import AdamW, DDPOptions, Policy, Stepper
from launcher.errors import ReplicaError
from launcher.trainer.replica_consistency import check_replicas
from tests.engine.observe import train
from tests.models import mlp
from tests.ranks.harness import run_ranks

FAULTS = {
    "weight": "0.weight (weight)",
    "master": "0.weight (master)",
    "state": "0.weight (optimizer state 1)",
    "vector": "0.bias (weight)",
    "scale": "loss scale (bad_loss_steps)",
    "rate": "learning rate",
}


def flip_one_bit(stepper: Stepper, fault: str) -> None:
    if fault == "rate":
        stepper.lr = math.nextafter(stepper.lr, 1.0)
        return
    if fault == "scale":
        state = stepper.scale.state
        stepper.scale.state = state._replace(bad_loss_steps=state.bad_loss_steps + 1)
        return
    matrices = stepper.zero1.shards[0]
    last = next(param for param in stepper.layout.params if param.name == "0.weight")
    tensor = {
        "weight": last.flat(matrices.weight),
        "master": last.flat(matrices.master),
        "state": last.flat(stepper.updater.states[0][1]),
        "vector": stepper.model[0].bias.data,
    }[fault]
    bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    bits[-1] ^= 1


def write_into_padding(stepper: Stepper) -> None:
    """It belongs to no parameter, so it may differ."""
    flat_buffer = stepper.layout.flat_buffers[0]
    flat_buffer.weight[flat_buffer.bucket_ranges[-1].gaps()[-1]] = 1.0


def drift(env: WorkerEnv, fault: str | None) -> str:
    stepper = Stepper(mlp(), AdamW(0.01), Policy.fp16(), env.group, reference_count=8)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + env.rank)
        train(stepper, torch.randn(8, 8, generator=generator), torch.zeros(8, dtype=torch.int64))
        check_replicas(stepper)
    if env.rank == 1:
        write_into_padding(stepper)
    if fault is not None and env.rank == 1:
        flip_one_bit(stepper, fault)
    try:
        check_replicas(stepper)
    except ReplicaError as error:
        return str(error)
    return ""


def test_equal_replicas_pass() -> None:
    assert run_ranks(3, drift, None) == [""] * 3


@pytest.mark.sampled(every=5, first=4)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_bit_on_one_rank_is_caught_and_named(fault) -> None:
    texts = run_ranks(3, drift, fault)
    assert len(set(texts)) == 1
    assert f"rank(s) 1 differ from the others in 1 of 23 tensors ({FAULTS[fault]})" in texts[0]


def drift_sharded(env: WorkerEnv) -> str:
    stepper = Stepper(
        mlp(), AdamW(0.01), Policy.fp16(), env.group, reference_count=8, ddp=DDPOptions(shard_optimizer=True)
    )
    train(stepper, torch.randn(8, 8), torch.zeros(8, dtype=torch.int64))
    check_replicas(stepper)
    if env.rank == 0:
        stepper.model[0].weight.data.view(torch.int16)[0, 0] ^= 1
    try:
        check_replicas(stepper)
    except ReplicaError as error:
        return str(error)
    return ""


def test_sharded_ranks_compare_the_weights_that_they_share() -> None:
    assert all("0.weight (weight)" in text for text in run_ranks(2, drift_sharded))
