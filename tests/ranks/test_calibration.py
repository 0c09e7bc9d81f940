"""The start of the loss scale where the ranks' first micro-batches show different things."""

from __future__ import annotations

import math

from launcher.distributed.process_group import WorkerEnv
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
