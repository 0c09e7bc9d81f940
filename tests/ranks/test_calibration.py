"""The start of the loss scale where the ranks' first micro-batches show different things."""

from __future__ import annotations

import math

import torch
from torch import nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, Stepper
from tests.models import Planted
from tests.ranks.harness import run_ranks

GRADIENTS: list[list[float | None]] = [  # by rank; None: without a micro-batch
    [0.0, 50.0, None],
    [50.0, math.nan, 1.0],
    [-math.inf, 0.0, 50.0],
    [None, 0.0, None],
]


def starts(env: WorkerEnv) -> list[int | None]:
    found = []
    for by_rank in GRADIENTS:
        model, gradient = Planted(), by_rank[env.rank]
        stepper = Stepper(model, SGD(0.1), group=env.group, reference_count=4)
        loss = None if gradient is None else lambda m=model, g=gradient: m(g, 0.0)
        found.append(stepper.calibrate(loss))
    return found


def test_the_largest_gradient_of_any_rank_decides_and_one_that_is_not_finite_forbids() -> None:
    ranks = run_ranks(3, starts)
    assert ranks[0] == ranks[1] == ranks[2]
    largest, *none = ranks[0]
    assert largest is not None
    assert 65504 / 16 < 3 * 50 * 2.0**largest / 4 <= 65504 / 4  # 3: the sum over the ranks
    assert none == [None, None, None]


class Lacking(Exception):
    pass


def after_a_failure(env: WorkerEnv) -> tuple[object, int | None, bool]:
    """What calibrate() gives where rank 1 raises, what it gives again, and whether buffers are kept."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    stepper = Stepper(model, SGD(0.1), group=env.group)
    before = model[1].running_mean.clone()

    def loss() -> tuple[torch.Tensor, int]:
        return model(torch.arange(12.0).reshape(4, 3)).square().sum(), 4

    def failing() -> tuple[torch.Tensor, int]:
        loss()
        raise Lacking

    first: object
    try:
        first = stepper.calibrate(failing if env.rank == 1 else loss, agree_on_failure=True)
    except Lacking:
        first = "raised"
    kept = torch.equal(model[1].running_mean, before)
    return first, stepper.calibrate(loss), kept


def test_a_pass_that_raises_keeps_no_rank_waiting_and_may_be_made_again() -> None:
    (found, again, kept), (raised, same, also_kept) = run_ranks(2, after_a_failure)
    assert (found, raised) == (None, "raised")
    assert again == same is not None
    assert kept
    assert also_kept
