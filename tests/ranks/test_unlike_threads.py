"""Ranks with unlike numbers of threads sum in other orders, and still take the same steps bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, DDPOptions, Policy, Stepper
from launcher.engine.grads.grad_norm import SquaresReader
from tests.engine.observe import state_digest
from tests.ranks.harness import run_ranks

STEPS = 10


def trained(env: WorkerEnv, policy: str, ddp: DDPOptions) -> tuple[list[float], str]:
    """The norms, and the digest of masters and states after some clipped steps."""
    torch.set_num_threads(1 + env.rank)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1000, 1500), nn.ReLU(), nn.Linear(1500, 2000), nn.ReLU(), nn.Linear(2000, 1000)
    )
    optimizer = SGD(0.1, momentum=0.9)
    stepper = Stepper(
        model, optimizer, Policy.named(policy), env.group, ddp=ddp, clip_norm=0.05, reference_count=4
    )
    generator = torch.Generator().manual_seed(env.rank)
    norms = []
    for _ in range(STEPS):
        x = torch.randn(4, 1000, generator=generator)
        with stepper.forward():
            loss = model(x).float().square().sum()
        stepper.backward(loss, 4)
        norms.append(stepper.step().read().grad_norm)
    masters = {} if ddp.shard_optimizer else {"digest": state_digest(stepper, counters=True)}
    weights = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    return norms, masters.get("digest", str(weights.tolist()[::1000]))


@pytest.mark.parametrize(
    ("policy", "ddp"),
    [
        ("fp32", DDPOptions()),
        ("fp16", DDPOptions()),
        pytest.param("fp16", DDPOptions(shard_optimizer=True), marks=pytest.mark.slow),
    ],
    ids=["fp32", "fp16", "fp16 sharded"],
)
def test_ranks_with_unlike_numbers_of_threads_take_the_same_steps(policy, ddp) -> None:
    first, second = run_ranks(2, trained, policy, ddp)
    assert first == second


def trained_with_other_rounding(env: WorkerEnv, ddp: DDPOptions) -> tuple[list[float], str]:
    """As on unlike processors: the sums of rank 1 differ in their last bits."""
    read = SquaresReader.read
    if env.rank:
        SquaresReader.read = lambda self: read(self) * (1 + 2.0**-50)  # type: ignore[method-assign]
    return trained(env, "fp16", ddp)


@pytest.mark.parametrize("ddp", [DDPOptions(), DDPOptions(shard_optimizer=True)], ids=["native", "sharded"])
def test_ranks_whose_sums_differ_in_their_last_bits_take_the_same_steps(ddp) -> None:
    first, second = run_ranks(2, trained_with_other_rounding, ddp)
    assert first == second
