"""Muon on two ranks: the weights of one process, and no shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.distributed.env import WorkerEnv
from launcher.engine import DDPOptions, MuonWithAdamW, Policy, Stepper, TorchOptimizer, UnusableError
from tests.engine.observe import train
from tests.engine.optim.test_muon import LR, batch, network
from tests.ranks.harness import run_ranks

OPTIMIZER = TorchOptimizer(MuonWithAdamW, LR)


def masters(group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """fp32, with the same samples on all ranks: their sum is that of one, doubled without rounding."""
    stepper = Stepper(network(), OPTIMIZER, Policy.fp32(), group, reference_count=16)
    for step in range(5):
        train(stepper, *batch(step))
    return {name: value.clone() for name, value in stepper.named_masters().items()}


def alone_and_together(env: WorkerEnv) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    alone = dist.new_group([env.rank], use_local_synchronization=True)
    with pytest.raises(UnusableError, match="MuonWithAdamW cannot be sharded: it needs whole parameters"):
        Stepper(network(), OPTIMIZER, group=env.group, ddp=DDPOptions(shard_optimizer=True))
    return masters(alone), masters(env.group)


def test_two_ranks_have_the_weights_of_one_and_refuse_shards() -> None:
    expected = None
    for alone, together in run_ranks(2, alone_and_together):
        expected = expected or alone
        for name, value in expected.items():
            assert torch.equal(together[name], value), name
