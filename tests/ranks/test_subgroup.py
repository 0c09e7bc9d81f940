"""The group of a Stepper: the default one, some of the ranks, or one. Ranks outside it take no part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, DDPOptions, Policy, Scaling, Stepper
from tests.engine.observe import flat_tensors, state_digest, train
from tests.models import Planted, conv_net, features
from tests.ranks.harness import run_ranks

WIRES = {"native": DDPOptions(), "sharded": DDPOptions(shard_optimizer=True)}


def all_that_communicates(group: dist.ProcessGroup) -> dict[str, Any]:
    """By wire, what a rank has after every collective of the engine, with an overflow on the second rank."""
    rank, found = dist.get_rank(group), {}
    for name, ddp in WIRES.items():
        model = conv_net(seed=rank)  # the first rank's values are taken
        stepper = Stepper(model, AdamW(0.01), Policy.fp16(), group, ddp=ddp, scaling=Scaling(init=256))
        x, classes = features(4 + rank, rank, (3, 8, 8))
        stepper.vote(rank)
        reports = [train(stepper, x, classes)]
        reports.append(train(stepper, x * (float("inf") if rank else 1.0), classes))
        stepper.buffers.average()
        state = stepper.state()
        found[name] = {
            "reference": state.reference_count,
            "votes": reports[0].votes[:2],
            "losses": [report.loss for report in reports][:1],
            "bad": [report.bad_losses for report in reports],
            "norm": reports[0].grad_norm,
            "state": {key: value.clone() for key, value in flat_tensors(state).items()},
            "digest": None if ddp.shard_optimizer else state_digest(stepper, counters=True),
        }
        stepper.load(state)
        after = flat_tensors(stepper.state())
        assert all(torch.equal(after[key], value) for key, value in found[name]["state"].items())
    return found


def alone(env: WorkerEnv) -> dict[str, Any]:
    assert env.group is not None
    return all_that_communicates(env.group)


def beside_another(env: WorkerEnv) -> dict[str, Any]:
    group = dist.new_group([1, 2])
    return all_that_communicates(group) if env.rank else {}


@pytest.mark.slow
def test_two_of_three_ranks_train_as_two_ranks_do() -> None:
    expected, (_, *found) = run_ranks(2, alone), run_ranks(3, beside_another, timeout_s=30)
    for ours, theirs in zip(found, expected, strict=True):
        for name in WIRES:
            states = ours[name].pop("state"), theirs[name].pop("state")
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), name
            assert ours[name] == theirs[name]
            assert ours[name]["votes"] == (1, 1)
            assert ours[name]["bad"] == [0, 1]
            assert ours[name]["losses"] == pytest.approx(ours["native"]["losses"])


def train_without_naming_a_group(env: WorkerEnv) -> tuple[bool, torch.Tensor]:
    model = Planted()
    with torch.no_grad():
        model.matrix.fill_(float(env.rank))
    stepper = Stepper(model, SGD(1.0), scaling=Scaling(init=64))
    stepper.backward(model(1.0 + env.rank, 0.0), 1)
    stepper.step()
    return stepper.group is env.group, stepper.named_masters()["matrix"].clone()


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_group_the_default_one_is_trained_in(world_size) -> None:
    """From rank 0's values, by the mean of all ranks' gradients; one process is alone."""
    for same_group, matrix in run_ranks(world_size, train_without_naming_a_group):
        assert same_group
        assert torch.equal(matrix, torch.full((2, 3), -(1 + world_size) / 2))


def train_in_a_group_of_one(env: WorkerEnv, ddp: DDPOptions) -> tuple[bool, torch.Tensor]:
    """The groups are gone before the first step: a collective would raise."""
    group = dist.new_group([env.rank], use_local_synchronization=True)
    stepper = Stepper(Planted(), SGD(1.0), group=group, ddp=ddp, scaling=Scaling(init=64))
    dist.destroy_process_group()
    stepper.backward(stepper.model(1.0 + env.rank, 0.0), 1)
    stepper.step()
    stepper.average_buffers()
    stepper.load(stepper.state())
    return stepper.group is None, stepper.named_masters()["matrix"].clone()


@pytest.mark.slow
@pytest.mark.parametrize("ddp", WIRES.values(), ids=WIRES)
def test_a_group_of_one_is_no_group(ddp) -> None:
    for rank, (no_group, matrix) in enumerate(run_ranks(2, train_in_a_group_of_one, ddp)):
        assert no_group
        assert torch.equal(matrix, torch.full((2, 3), -1.0 - rank))
