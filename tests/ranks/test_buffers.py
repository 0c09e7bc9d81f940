"""The buffers of several ranks: each has its own until they are averaged for an evaluation."""

from __future__ import annotations

import torch
from torch import nn

from launcher.checkpoint.run_state import mean_over_ranks
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, ExponentialMovingAverage, Policy, Stepper
from tests.ranks.harness import run_ranks


class Counting(nn.Module):
    """A float, a double and an integer buffer, and one without elements, beside one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("running_exact", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0))


def average_own_values(env: WorkerEnv) -> dict[str, torch.Tensor]:
    model = Counting()
    stepper = Stepper(model, SGD(0.1), Policy.fp16(), env.group)
    for buffer in model.buffers():
        buffer.fill_(10 * env.rank + 1)
    stepper.buffers.average()
    stepper.buffers.average()  # the mean of equal values is that value
    averaged = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if env.group is not None:
        model.running_mean.add_(1)
        stepper.buffers.restore()  # to the mean: it is what the next step starts from
        assert torch.equal(model.running_mean, averaged["running_mean"])
    return averaged


def test_floating_point_buffers_are_averaged_and_integers_left_alone() -> None:
    for rank, found in enumerate(run_ranks(3, average_own_values)):
        assert torch.equal(found["running_mean"], torch.full((3,), 11.0))  # of 1, 11, 21
        assert torch.equal(found["running_exact"], torch.full((2,), 11.0, dtype=torch.float64))
        assert int(found["count"]) == 10 * rank + 1


class Queueing(nn.Module):
    """Buffers that are no statistics, beside one that is: a queue, a mask of -inf, a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("running_var", torch.zeros(2))
        self.register_buffer("queue", torch.zeros(3))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("unset", torch.tensor(float("nan")))


def evaluate_with_queue(env: WorkerEnv) -> dict[str, torch.Tensor]:
    model = Queueing()
    stepper = Stepper(model, SGD(0.1), Policy.fp32(), env.group)
    average = ExponentialMovingAverage(stepper, decay=0.5)
    stepper.backward(model.weight.float().sum(), 1)
    model.queue.fill_(env.rank + 1)
    model.running_var.fill_(env.rank + 1)
    stepper.step()
    average.update(1)
    with average.in_model():
        averaged = {f"average of {name}": buffer.clone() for name, buffer in model.named_buffers()}
    assert torch.equal(model.queue, torch.full((3,), env.rank + 1.0))
    stepper.average_buffers()
    return averaged | {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_that_are_no_statistics_are_those_of_rank_0() -> None:
    for found in run_ranks(2, evaluate_with_queue):
        for kind in ("", "average of "):
            assert torch.equal(found[f"{kind}queue"], torch.ones(3))
            assert torch.equal(found[f"{kind}mask"], torch.full((2, 2), float("-inf")).triu(1))
            assert found[f"{kind}unset"].isnan()
        assert torch.equal(found["running_var"], torch.full((2,), 1.5))


def test_a_checkpoint_for_other_ranks_has_the_same_values_as_an_evaluation() -> None:
    rows = torch.tensor([[1.0], [2.0]])
    assert mean_over_ranks("norm.running_mean", rows) == 1.5
    assert mean_over_ranks("memory.queue", rows) == 1.0


def test_alone_there_is_nothing_to_average() -> None:
    (found,) = run_ranks(1, average_own_values)
    assert torch.equal(found["running_mean"], torch.ones(3))
