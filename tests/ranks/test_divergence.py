"""A batch that ends a run is named alike on all ranks, by real processes; weights and buffers stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.nn.functional as F
from torch import nn

from launcher.data.batch_plan import BatchPlan, epoch_order
from launcher.data.tensors import Batch, DeviceBatches, TensorData
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, Policy, Stepper
from launcher.recipe import Loss
from launcher.trainer.diagnostics.nonfinite_inspector import NonFiniteInspector
from launcher.trainer.progress import StepIndex
from tests.engine.observe import state_digest
from tests.models import conv_net, features
from tests.ranks.harness import run_ranks

NUM_SAMPLES, BATCH_SIZE, SEED, EPOCH, STEP = 40, 16, 3, 1, 2


def loss(network: nn.Module, batch: Batch) -> Loss:
    logits = network(batch["image"]).float()
    return Loss(F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits))


def breaking_transform(batch: Batch) -> Batch:
    """Fails on the rank whose share holds the planted value."""
    if not batch["image"].isfinite().all():
        raise RuntimeError("cannot be transformed twice")
    return batch


def explain(env: WorkerEnv, planted: int, transform_fails: bool) -> tuple[str, bool]:
    """What this rank gets, and whether its state stayed as it was."""
    images, labels = features(NUM_SAMPLES, 0, (3, 8, 8))
    images[planted, 1, 2, 3] = float("nan")
    plan = BatchPlan(NUM_SAMPLES, BATCH_SIZE, 3, env.world_size, env.rank, SEED, False)
    transform = breaking_transform if transform_fails else None
    batches = DeviceBatches(TensorData({"image": images, "label": labels}), plan, transform)
    model = conv_net().train()
    stepper = Stepper(
        model,
        SGD(0.1),
        Policy.fp16(),
        env.group,
        micro_batches=plan.micro_batches,
        reference_count=8,
    )
    before = state_digest(stepper)
    recipe = SimpleNamespace(loss=loss)
    context = SimpleNamespace(stepper=stepper, env=env, recipe=recipe, batches=batches)
    text = NonFiniteInspector(cast(Any, context)).explain(
        StepIndex(EPOCH, STEP - 1, EPOCH * plan.steps_per_epoch + STEP), range(env.world_size), True
    )
    return text, state_digest(stepper) == before


def user_location(position: int, world_size: int) -> tuple[int, int]:
    """Sample at this position of the step's global batch, and the rank that trains on it."""
    order = epoch_order(NUM_SAMPLES, SEED, EPOCH)
    plans = [
        BatchPlan(NUM_SAMPLES, BATCH_SIZE, 3, world_size, rank, SEED, False) for rank in range(world_size)
    ]
    at = (STEP - 1) * BATCH_SIZE + position
    (rank,) = (p.rank for p in plans if any(at in shard for shard in p.micro_positions(STEP - 1)))
    return int(order[at]), rank


@pytest.mark.parametrize(("world_size", "position"), [(1, 0), (2, 3), (2, 15), (3, 7), (4, 12)])
def test_all_ranks_name_the_same_rank_sample_and_module(world_size, position) -> None:
    sample, rank = user_location(position, world_size)
    results = run_ranks(world_size, explain, sample, False)
    texts = {text for text, _ in results}
    assert len(texts) == 1
    assert all(unchanged for _, unchanged in results)
    lines = texts.pop().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(f"  rank {rank}: training sample {sample} (of ")
    assert "image" in lines[1]
    assert "module whose output was not finite: 0 (Conv2d), nan" in lines[1]


def test_a_rank_that_cannot_look_again_does_not_hang_the_others() -> None:
    sample, rank = user_location(9, 2)
    results = run_ranks(2, explain, sample, True)
    assert results[0][0] == results[1][0]
    assert f"rank {rank}: the batch could not be run again: RuntimeError" in results[0][0]


def test_a_clean_batch_is_told_as_finite() -> None:
    outside = int(epoch_order(NUM_SAMPLES, SEED, EPOCH)[-1])
    (first, _), (second, unchanged) = run_ranks(2, explain, outside, False)
    assert first == second
    assert first.count("the forward pass is finite") == 2
    assert unchanged
