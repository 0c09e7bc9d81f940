"""Where one rank abandons a step, all ranks skip it alike, whichever of the two each of them calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, DDPOptions, Policy, Scaling, Stepper, StepReport
from tests.engine.observe import state_digest
from tests.engine.test_abandon import Failing
from tests.models import Planted
from tests.ranks.harness import run_ranks

WIRES: dict[str, dict[str, Any]] = {
    "native": {},
    "predivided": {"gradient_predivide_factor": 4},
    "sharded": {"shard_optimizer": True},
}


class Matrices(nn.Module):
    """Two matrices and nothing else: the marks of the ranks travel in half precision, or not in a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(5, 7))
        self.vector = nn.Parameter(torch.zeros(3, 11))  # so named for the sake of Planted's forward

    forward = Planted.forward


def build(env: WorkerEnv, model: nn.Module, ddp: str, micro_batches: int, overlap: bool) -> Stepper:
    return Stepper(
        model,
        SGD(1.0),
        Policy.fp16(),
        env.group,
        scaling=Scaling(init=1, growth_interval=100),
        ddp=DDPOptions(bucket_bytes=1, overlap=overlap, **WIRES[ddp]),
        micro_batches=micro_batches,
    )


def fail_halfway(stepper: Stepper) -> None:
    """The way back ends before the matrix, when the bucket of the vector may have been sent."""
    model = stepper.model
    loss = (Failing.apply(model.matrix.float()) * 50.0).sum() + (model.vector * torch.inf).sum()
    with pytest.raises(torch.OutOfMemoryError):
        stepper.backward(loss, 8)


def abandon_some(env: WorkerEnv, model: type[nn.Module], ddp: str, micro_batches: int, overlap: bool) -> Any:
    """Reports of steps that ranks abandon in turn, of a clean one at the end, and the masters then."""
    stepper = build(env, model(), ddp, micro_batches, overlap)

    def train(calls: int, gradient: float = 1.0) -> StepReport:
        for _ in range(calls):
            stepper.backward(stepper.model(gradient, gradient), 1)
        return stepper.step().read()

    train(micro_batches)
    before = state_digest(stepper, counters=True)
    reports = []
    for abandoning in ((1,), (0,), (0, env.world_size - 1)):
        for call in ("step", "abandon", "abandon without backward"):
            stepper.vote(0)
            if env.rank not in abandoning:
                reports.append(train(micro_batches, torch.inf if call == "abandon" else 1.0))
            elif call == "step":
                fail_halfway(stepper)
                reports.append(stepper.step().read())
            else:
                if call == "abandon":
                    stepper.backward(stepper.model(50.0, 50.0), 1)
                reports.append(stepper.abandon().read())
    unchanged = state_digest(stepper, counters=True) == before
    reports.append(train(micro_batches))
    return reports, unchanged, [master.clone() for master in stepper.named_masters().values()]


CASES = [(Planted, ddp, micro_batches, True) for ddp in WIRES for micro_batches in (1, 2)]
CASES += [(Matrices, ddp, 1, True) for ddp in WIRES]
CASES += [(Planted, "native", 1, False), (Matrices, "sharded", 2, False)]


def some_cases(env: WorkerEnv, cases: list[Any]) -> list[Any]:
    return [abandon_some(env, *case) for case in cases]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("world_size", "cases"), [(2, CASES), (3, CASES[-6:])], ids=["2 ranks", "3 ranks"])
def test_all_ranks_skip_what_one_abandons(world_size, cases) -> None:
    expected = [(1,)] * 3 + [(0,)] * 3 + [(0, world_size - 1)] * 3 + [()]
    for results in run_ranks(world_size, some_cases, cases):
        for case, (reports, unchanged, masters) in zip(cases, results, strict=True):
            assert [report.abandoned_ranks for report in reports] == expected, case
            assert [report.skipped for report in reports] == [True] * 9 + [False], case
            assert {report.culprit_ranks for report in reports} == {()}, case
            assert {report.votes[:4] for report in reports} == {(0, 0, 0, 0)}, case
            assert [report.count for report in reports[:-1]] == [0] * 9, case
            assert (reports[-1].applied_steps, reports[-1].skipped_steps) == (2, 0), case
            assert unchanged, case
            assert all(torch.equal(master, torch.full_like(master, -2.0)) for master in masters), case
