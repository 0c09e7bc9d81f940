"""Random training steps on several ranks: any share of micro-batches, failures, abandoned steps.

Each rank draws the same course of events and knows what all ranks do. After every step all ranks must hold
the same bits and report the same verdict, near those of a loop of plain torch on one process.
"""

from __future__ import annotations

import copy
import random
import warnings
from dataclasses import dataclass

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.engine import AdamW, DDPOptions, Policy, Scaling, Stepper, UnusableError
from tests.engine.observe import state_digest, weights_are_rounded_masters
from tests.engine.test_any_order import (
    CLIP,
    EPS,
    GROWTH,
    INIT,
    MAX,
    REFERENCE,
    Net,
    Reference,
    batch_of,
    loss_sum,
)
from tests.ranks.harness import run_ranks

MICRO_BATCHES = 2


@dataclass(frozen=True)
class Part:
    """What one rank does in one step."""

    batches: tuple[tuple[int, int, float], ...]  # seed, size, factor of the loss
    probes: bool  # a backward pass of its own between the others
    refused: bool  # a loss that the engine refuses, between the others
    fails: bool  # its last backward pass raises
    abandons: bool


def parts_of(draw: random.Random, world_size: int) -> list[Part]:
    """One step of all ranks; some rank has a sample."""
    trouble = draw.random() < 0.3
    parts = []
    for rank in range(world_size):
        num = draw.randint(1 if rank == 0 else 0, MICRO_BATCHES)
        factors = [draw.choice([1.0] * 30 + [1e12, float("nan")]) for _ in range(num)]
        batches = tuple((draw.randrange(100), draw.randint(3, 6), factor) for factor in factors)
        fails = trouble and num > 0 and draw.random() < 0.3
        abandons = trouble and draw.random() < 0.3
        parts.append(Part(batches, draw.random() < 0.2, draw.random() < 0.2, fails, abandons))
    return parts


def play(stepper: Stepper, model: Net, part: Part) -> None:
    """This rank's share of a step, up to step() or abandon()."""
    for position, (seed, size, factor) in enumerate(part.batches):
        batch = batch_of(seed, size, factor)
        last = position == len(part.batches) - 1
        if part.refused:
            with pytest.raises(UnusableError):
                stepper.backward(model.last.weight.half().sum(), 1)
        model.fails = part.fails and last
        with stepper.forward():
            loss = loss_sum(model, batch)
        if model.fails:
            with pytest.raises(MemoryError):
                stepper.backward(loss, size)
        else:
            stepper.backward(loss, size)
        model.fails = False
    if part.probes:
        buffers = [buffer.clone() for buffer in model.buffers()]
        with stepper.forward():
            loss_sum(model, batch_of(0, 4)).backward()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


def train_at_random(
    env: WorkerEnv, policy: Policy, ddp: DDPOptions, num_steps: int
) -> tuple[list[str], int, int]:
    """The replicas' digests, the steps that were abandoned, and those skipped for another reason."""
    warnings.simplefilter("ignore")  # of ranks without samples whose p.grad holds a probe
    torch.manual_seed(0)
    model = Net()
    reference = Reference(policy, MICRO_BATCHES, copy.deepcopy(model), "adamw")
    dynamic = policy.scale_mode == "dynamic"
    stepper = Stepper(
        model,
        AdamW(0.05, eps=EPS, weight_decay=0.01),
        policy,
        env.group,
        scaling=Scaling("dynamic", init=INIT, growth_interval=GROWTH, max=MAX) if dynamic else None,
        ddp=ddp,
        clip_norm=CLIP,
        micro_batches=MICRO_BATCHES,
        reference_count=REFERENCE,
        emulate=True,
    )
    draw = random.Random(0)
    digests, abandoned, skipped = [], 0, 0
    for step in range(num_steps):
        parts = parts_of(draw, env.world_size)
        mine = parts[env.rank]
        play(stepper, model, mine)
        gone = tuple(rank for rank, part in enumerate(parts) if part.fails or part.abandons)
        report = None
        if mine.abandons:
            stepper.abandon()
        else:
            report = stepper.step().read()
        if gone:
            reference.abandon()
            abandoned += 1
            assert report is None or (report.skipped and report.abandoned_ranks == gone), (step, report, gone)
        else:
            for rank, part in enumerate(parts):
                for batch in part.batches:
                    reference.backward(batch_of(*batch), own=rank == env.rank)
            assert report is not None
            expected = reference.step()
            skipped += expected
            assert report.skipped == expected, (step, report)
        assert int(stepper.scale.state.applied_steps) == reference.applied, step
        assert float(stepper.scale.value()) == (2.0**reference.exponent if dynamic else 1.0), step
        masters = stepper.named_masters()
        for name, p in reference.master.named_parameters():
            torch.testing.assert_close(masters[name], p.detach(), rtol=2e-3, atol=1e-3, msg=f"{step} {name}")
            p.data.copy_(masters[name])  # roundings of the wire do not add up
        for ours, theirs in zip(model.buffers(), reference.master.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        assert weights_are_rounded_masters(stepper), step
        digests.append(weights_digest(stepper))
    return digests, abandoned, skipped


def weights_digest(stepper: Stepper) -> str:
    """Of what all ranks hold alike; buffers are each rank's own."""
    kept = [buffer.clone() for buffer in stepper.model.buffers()]
    for buffer in stepper.model.buffers():
        buffer.zero_()
    digest = state_digest(stepper, counters=True)
    for buffer, values in zip(stepper.model.buffers(), kept, strict=True):
        buffer.copy_(values)
    return digest


CASES = {
    "fp16": (3, Policy.fp16(), DDPOptions()),
    "fp32": (2, Policy.fp32(), DDPOptions(overlap=False)),
    "sharded": (3, Policy.fp16(), DDPOptions(shard_optimizer=True, bucket_bytes=64)),
    "bf16": (3, Policy.bf16(), DDPOptions(bucket_bytes=64)),
}


def agree(case: str, num_steps: int, timeout_s: float = 60) -> tuple[int, int]:
    """How many steps were abandoned, and how many skipped for another reason, on all ranks alike."""
    world_size, policy, ddp = CASES[case]
    results = run_ranks(world_size, train_at_random, policy, ddp, num_steps, timeout_s=timeout_s)
    if not ddp.shard_optimizer:  # else each rank has masters of its own, and the reference alone decides
        assert len({tuple(digests) for digests, _, _ in results}) == 1
    (counts,) = {result[1:] for result in results}
    return counts


@pytest.mark.parametrize("case", [pytest.param("fp16", marks=pytest.mark.slow), "sharded"])
def test_ranks_agree_whatever_each_of_them_does(case: str) -> None:
    abandoned, skipped = agree(case, 25)
    assert abandoned >= 3
    assert skipped >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_five_hundred_steps(case: str) -> None:
    agree(case, 500, timeout_s=500)
