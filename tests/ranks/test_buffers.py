"""The buffers of several ranks: each has its own until they are averaged for an evaluation."""

from __future__ import annotations

import torch
from torch import nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, Policy, Stepper
from tests.ranks.harness import run_ranks


class Counting(nn.Module):
    """A float, a double and an integer buffer, and one without elements, beside one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("exact", torch.zeros(2, dtype=torch.float64))
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
        model.mean.add_(1)
        stepper.buffers.restore()  # to the mean: it is what the next step starts from
        assert torch.equal(model.mean, averaged["mean"])
    return averaged


def test_floating_point_buffers_are_averaged_and_integers_left_alone() -> None:
    for rank, found in enumerate(run_ranks(3, average_own_values)):
        assert torch.equal(found["mean"], torch.full((3,), 11.0))  # of 1, 11, 21
        assert torch.equal(found["exact"], torch.full((2,), 11.0, dtype=torch.float64))
        assert int(found["count"]) == 10 * rank + 1


def test_alone_there_is_nothing_to_average() -> None:
    (found,) = run_ranks(1, average_own_values)
    assert torch.equal(found["mean"], torch.ones(3))
