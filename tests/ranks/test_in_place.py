"""In-place changes on several ranks: all hold the same bits, whoever's samples asked for which rows."""

from __future__ import annotations

import warnings

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.engine import AdamW, DDPOptions, Policy, Scaling, Stepper
from launcher.trainer.replica_consistency import check_replicas
from tests.engine.observe import state_digest, train
from tests.models import conv_net, features
from tests.ranks.harness import run_ranks

WIRES = {"native": DDPOptions(), "sharded": DDPOptions(shard_optimizer=True)}


def clamp_between(env: WorkerEnv, ddp: DDPOptions) -> tuple[str, str]:
    """Digests after two steps with a clamp in between: written in place, and loaded as a state."""
    digests = []
    for loads in (False, True):
        stepper = Stepper(
            conv_net(), AdamW(0.01), Policy.fp16(), env.group, ddp=ddp, scaling=Scaling("static", 64)
        )
        train(stepper, *features(4, env.rank, (3, 8, 8)))
        before = {name: value.clone() for name, value in stepper.named_masters().items()}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for p in stepper.model.parameters():
                p.clamp_(-0.0625, 0.0625)
            state = stepper.state().clone()
        for name, p in stepper.model.named_parameters():
            kept = before[name].to(p.dtype) == p
            assert torch.equal(state.weights[name], torch.where(kept, before[name], p.float()))
        if loads:
            stepper = Stepper(
                conv_net(), AdamW(0.01), Policy.fp16(), env.group, ddp=ddp, scaling=Scaling("static", 64)
            )
            stepper.load(state)
        train(stepper, *features(4, 2 + env.rank, (3, 8, 8)))
        digests.append(state_digest(stepper))
        check_replicas(stepper)
    return digests[0], digests[1]


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize("ddp", ["native", "sharded"])
def test_a_clamp_reaches_the_masters_wherever_they_are(ddp) -> None:
    for written, loaded in run_ranks(2, clamp_between, WIRES[ddp]):
        assert written == loaded
