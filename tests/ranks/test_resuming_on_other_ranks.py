"""A checkpoint resumes bit for bit on as many ranks, and from the same values on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from launcher.checkpoint.catalog import resume
from launcher.checkpoint.run_state import RunIdentity, TrainProgress, restore
from launcher.checkpoint.storage import publish
from launcher.data.seeding import seed_compute
from launcher.distributed.env import WorkerEnv
from launcher.engine import AdamW, DDPOptions, Stepper
from tests.configs import composed
from tests.engine.observe import state_digest, train
from tests.models import conv_net, features
from tests.ranks.harness import run_ranks
from tests.snapshots import comparable, take


def stepper_of(env: WorkerEnv, shard: bool) -> Stepper:
    model = nn.Sequential(conv_net(), nn.Dropout(0.5))
    return Stepper(
        model, AdamW(0.01), group=env.group, ddp=DDPOptions(shard_optimizer=shard), reference_count=4
    )


def run(env: WorkerEnv, stepper: Stepper, steps: range) -> None:
    """Ranks draw different amounts of random numbers, as they do where their shares differ."""
    for step in steps:
        seed_compute(0, step, env.rank, 0, env.device)
        train(stepper, *features(4 + env.rank, 10 * step + env.rank, (3, 8, 8)))


def save(env: WorkerEnv, directory: Path, shard: bool) -> tuple[str, dict]:
    """Publish after three steps; the digest after six, and what was published."""
    torch.manual_seed(5)
    stepper = stepper_of(env, shard)
    run(env, stepper, range(3))
    identity = RunIdentity.of(composed(), stepper.model, 100)
    snapshot = take(stepper, env, identity, TrainProgress(0, 3, 24))
    assert (snapshot is None) == (env.rank > 0), "one rank holds the only copy"
    if snapshot is not None:
        publish(directory, snapshot)
    run(env, stepper, range(3, 6))
    return state_digest(stepper, counters=True), comparable(snapshot and snapshot.engine)


def go_on(env: WorkerEnv, directory: Path, shard: bool) -> tuple[str, dict]:
    torch.manual_seed(77)
    stepper = stepper_of(env, shard)
    identity = RunIdentity.of(composed(), stepper.model, 100)
    resumption = resume(env, directory, "auto", identity)
    assert resumption.snapshot is not None
    restore(stepper, resumption.snapshot, env)
    again = take(stepper, env, identity, resumption.snapshot.progress)
    run(env, stepper, range(3, 6))
    return state_digest(stepper, counters=True), comparable(again and again.engine)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_two_ranks_go_on_bit_for_bit(tmp_path: Path, shard) -> None:
    saved = run_ranks(2, save, tmp_path, shard)
    assert run_ranks(2, go_on, tmp_path, shard) == saved


@pytest.mark.slow
def test_other_ranks_and_another_wire_go_on_from_the_same_values(tmp_path: Path) -> None:
    (_, engine), _ = run_ranks(2, save, tmp_path, True)
    for world_size in (3, 1):
        assert run_ranks(world_size, go_on, tmp_path, False)[0][1] == engine
