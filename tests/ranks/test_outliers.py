"""An outlier of one rank's data: all ranks skip the same steps and hold the same bits."""

from __future__ import annotations

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, DDPOptions, Policy, Scaling, SkipOutliers, Stepper
from tests.engine.observe import train
from tests.models import features, mlp
from tests.ranks.harness import run_ranks


def skipped_steps(env: WorkerEnv, sharded: bool) -> tuple[list[int], list[int], dict[str, torch.Tensor]]:
    stepper = Stepper(
        mlp(),
        SGD(0.01),
        Policy.fp16(),
        env.group,
        scaling=Scaling(init=64),
        ddp=DDPOptions(shard_optimizer=sharded),
        reference_count=8,
        skip_outliers=SkipOutliers(6.0, 8),
    )
    outliers, applied = [], []
    for step in range(20):
        x, classes = features(8, 2 * step + env.rank)
        if step in (10, 15) and env.rank == step % 2:
            x = 40 * x
        report = train(stepper, x, classes)
        outliers += [step] * report.outlier
        applied += [step] * (not report.skipped)
    stepper.average_buffers()
    return outliers, applied, {name: value.clone() for name, value in stepper.replicas().items()}


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_skip_the_same_steps(sharded: bool) -> None:
    (outliers, applied, mine), (theirs, *_, other) = run_ranks(2, skipped_steps, sharded)
    assert outliers == theirs == [10, 15]
    assert len(applied) == 18
    assert any("recent losses" in name for name in mine)
    for name, value in mine.items():
        assert torch.equal(value.nan_to_num(), other[name].nan_to_num()), name
