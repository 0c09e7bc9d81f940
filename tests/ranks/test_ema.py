"""The moving average of the weights on several ranks: sharded as not, and the same model on all of them."""

from __future__ import annotations

import torch

from launcher.distributed.env import WorkerEnv
from launcher.engine import AdamW, DDPOptions, ExponentialMovingAverage, Policy, Scaling, Stepper
from tests.engine.observe import state_digest, train
from tests.models import conv_net, features
from tests.ranks.harness import run_ranks


def averages(env: WorkerEnv, sharded: bool) -> dict[str, torch.Tensor]:
    ddp = DDPOptions(shard_optimizer=sharded)
    stepper = Stepper(conv_net(), AdamW(0.01), Policy.fp16(), env.group, ddp=ddp, scaling=Scaling(init=1024))
    average = ExponentialMovingAverage(stepper, 0.9)
    for number in range(5):
        x, classes = features(8, 10 * number + env.rank, (3, 8, 8))
        train(stepper, x * float("inf") if number == 3 and env.rank == 0 else x, classes)
        average.update(number)
    before = state_digest(stepper)
    with average.in_model():
        found = {name: value.clone() for name, value in stepper.model.state_dict().items()}
    assert state_digest(stepper) == before
    state = average.state()
    again = ExponentialMovingAverage(stepper, 0.9)
    again.load(state)
    assert all(map(torch.equal, again.tensors(), average.tensors()))
    numel = sum(p.numel() for p in stepper.model.parameters())
    assert (sum(tensor.numel() for tensor in average.tensors()) < numel) == sharded
    assert ("0.weight (average)" in average.replicas()) == (not sharded)
    assert "1.weight (average)" in average.replicas()
    return {f"average of {name}": value.clone() for name, value in state.weights.items()} | found


def test_two_ranks_hold_the_same_averages_sharded_or_not() -> None:
    whole, sharded = run_ranks(2, averages, False), run_ranks(2, averages, True)
    for name, value in whole[0].items():
        assert torch.equal(whole[1][name], value), name
        assert torch.equal(sharded[1][name], sharded[0][name]), name
        # The sum of a sharded gradient is not rounded to fp16.
        torch.testing.assert_close(sharded[0][name], value, rtol=2e-3, atol=2e-3)
