"""Memory runs out at any allocation of a step: the step is dropped on all ranks, and nobody waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, DDPOptions, Policy, Scaling, Stepper, StepReport
from launcher.engine.precision.found_inf import StepTotals
from tests.engine.observe import state_digest
from tests.models import features, loss_sum, mlp
from tests.ranks.harness import run_ranks
from tests.shortage import NOWHERE, Shortage

WIRES: dict[str, DDPOptions] = {
    "native": DDPOptions(bucket_bytes=1),
    "predivided": DDPOptions(bucket_bytes=1, gradient_predivide_factor=4),
    "sharded": DDPOptions(bucket_bytes=1, shard_optimizer=True),
    "without overlap": DDPOptions(bucket_bytes=1, shard_optimizer=True, overlap=False),
}


def stepper_of(env: WorkerEnv, ddp: str, micro_batches: int, first: bool) -> Stepper:
    """Ready for its `first` step, in which the ranks agree on a reference count, or for its second."""
    stepper = Stepper(
        mlp(),
        SGD(0.1, momentum=0.9),
        Policy.fp16(),
        env.group,
        ddp=WIRES[ddp],
        scaling=Scaling(init=1024),
        micro_batches=micro_batches,
    )
    if not first:
        step(stepper, env.rank, micro_batches)
    return stepper


def step(stepper: Stepper, rank: int, micro_batches: int, at: int = NOWHERE) -> tuple[StepReport, int, int]:
    """The report, the allocations of this step, and those until the totals were sent."""
    x, classes = features(4 * micro_batches, rank)
    sent = 0
    totals = stepper._parts.totals
    reduce = totals.reduce

    def reducing(message: Tensor) -> StepTotals:
        nonlocal sent
        sent = shortage.allocations
        return reduce(message)

    totals.reduce = reducing  # type: ignore[method-assign]
    shortage = Shortage(at)
    try:
        for part in torch.arange(len(x)).split(4):
            with stepper.forward():
                loss = loss_sum(stepper.model(x[part]), classes[part])
            with shortage:
                stepper.backward(loss, len(part))
        with shortage:
            result = stepper.step()
    except torch.OutOfMemoryError:
        assert stepper.can_abandon
        result = stepper.abandon()
    finally:
        totals.reduce = reduce  # type: ignore[method-assign]
    return result.read(), shortage.allocations, sent


def plant_everywhere(
    env: WorkerEnv, ddp: str, micro_batches: int, all_ranks: bool, first: bool
) -> tuple[int, bool]:
    """At each allocation of a step until the totals were sent.

    How many there are, and whether the state is at last that of a run without shortage.
    """
    undisturbed = stepper_of(env, ddp, micro_batches, first)
    _, _, allocations = step(undisturbed, env.rank, micro_batches)
    expected = state_digest(undisturbed)
    stepper = stepper_of(env, ddp, micro_batches, first)
    before = state_digest(stepper, counters=True)
    for at in range(allocations):
        short = range(env.world_size) if all_ranks else [at % env.world_size]
        report, _, _ = step(stepper, env.rank, micro_batches, at if env.rank in short else NOWHERE)
        assert report.abandoned_ranks == tuple(short), (ddp, at, report.abandoned_ranks)
        assert state_digest(stepper, counters=True) == before, (ddp, at)
    step(stepper, env.rank, micro_batches)
    return allocations, state_digest(stepper) == expected


def some_cases(env: WorkerEnv, cases: list[tuple[str, int, bool, bool]]) -> list[tuple[int, bool]]:
    return [plant_everywhere(env, *case) for case in cases]


CASES = [(ddp, 1, every, False) for ddp in WIRES for every in (False, True)]
CASES += [(ddp, 2, False, False) for ddp in ("native", "sharded")]
CASES += [("native", 1, every, True) for every in (False, True)]


FEW = [(ddp, 1, ddp == "native", ddp == "native") for ddp in ("native", "sharded")]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (3, FEW),
        pytest.param(2, CASES, marks=pytest.mark.slow),
        pytest.param(3, CASES, marks=pytest.mark.slow),
    ],
    ids=["some wires", "2 ranks", "3 ranks"],
)
def test_a_shortage_at_any_allocation_of_a_step_drops_it_on_all_ranks(world_size, cases) -> None:
    for results in run_ranks(world_size, some_cases, cases, timeout_s=200):
        for case, (allocations, equal) in zip(cases, results, strict=True):
            assert allocations > 20, case
            assert equal, case
