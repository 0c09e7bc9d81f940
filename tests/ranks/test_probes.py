"""Backward passes of one rank's own, beside those of Stepper.backward(), never reach the wire."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, DDPOptions, EngineWarning, Policy, Scaling, Stepper
from tests.models import Planted
from tests.ranks.harness import run_ranks

WIRES = {"native": {}, "sharded": {"shard_optimizer": True}}
Case = tuple[str, bool, int, bool]  # wire, overlap, micro-batches, whether rank 1 has none of them

CASES: list[Case] = [
    (ddp, overlap, micro_batches, empty)
    for ddp in WIRES
    for overlap in (True, False)
    for micro_batches in (1, 2)
    for empty in (True, False)
]


def train_beside_probes(env: WorkerEnv, case: Case) -> tuple[list[Tensor], list[bool], bool]:
    """Masters after two steps with a gradient of 1, whether these were skipped, whether p.grad is kept."""
    name, overlap, micro_batches, empty = case
    model = Planted(5, 7, 11)
    ddp = DDPOptions(bucket_bytes=1, overlap=overlap, **WIRES[name])
    scaling = Scaling("static", 1)
    options = {"scaling": scaling, "reference_count": 1, "micro_batches": micro_batches, "ddp": ddp}
    stepper = Stepper(model, SGD(1.0), Policy.fp16(), env.group, **options)
    skipped = []

    def probe() -> None:
        if env.rank == 1:
            model(200.0, 200.0).backward()

    for _ in range(2):
        probe()
        for _ in range(0 if empty and env.rank == 1 else micro_batches):
            probe()
            stepper.backward(model(1.0, 1.0), 1)
        probe()
        missed = empty and env.rank == 1 and not skipped  # warned of once
        with pytest.warns(EngineWarning, match="without backward") if missed else nullcontext():
            skipped.append(stepper.step().read().skipped)
    grads = [p.grad for p in model.parameters()]
    times = 2 * (2 + (0 if empty else micro_batches))
    kept = (
        all(grad is None for grad in grads)
        if env.rank == 0
        else all(torch.equal(grad, torch.full_like(grad, 200.0 * times)) for grad in grads)
    )
    return [master.clone() for master in stepper.named_masters().values()], skipped, kept


def all_cases(env: WorkerEnv) -> list[tuple[list[Tensor], list[bool], bool]]:
    return [train_beside_probes(env, case) for case in CASES]


@pytest.mark.slow
def test_a_probe_of_one_rank_is_not_sent_on_any_wire() -> None:
    for results in run_ranks(2, all_cases):
        for case, (masters, skipped, kept) in zip(CASES, results, strict=True):
            assert skipped == [False, False], case
            assert all(torch.equal(master, torch.full_like(master, -2.0)) for master in masters), case
            assert kept, case


def train_two_networks(env: WorkerEnv, ddp: str) -> list[Tensor]:
    """The backward pass of the second goes through the first, while the gradients of the first travel."""
    networks = [Planted(5, 7, 11) for _ in range(2)]
    steppers = [
        Stepper(
            network,
            SGD(1.0),
            Policy.fp16(),
            dist.new_group(),
            scaling=Scaling("static", 1),
            reference_count=1,
            ddp=DDPOptions(bucket_bytes=1, **WIRES[ddp]),
        )
        for network in networks
    ]
    for _ in range(2):
        for number in (0, 1):
            both = sum(network(1.0 + env.rank, 1.0) for network in networks)
            steppers[number].backward(both, 1)
        for stepper in steppers:
            stepper.step()
    return [master.clone() for stepper in steppers for master in stepper.named_masters().values()]


@pytest.mark.slow
@pytest.mark.parametrize("ddp", WIRES)
def test_two_networks_whose_steps_interleave_train_as_if_alone(ddp) -> None:
    for masters in run_ranks(2, train_two_networks, ddp):
        for master in masters:
            # the mean of 1 and 2, and of 1 and 1
            assert torch.equal(master, torch.full_like(master, -3.0 if master.ndim == 2 else -2.0))
