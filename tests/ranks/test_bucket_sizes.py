"""Buckets that change size while a run trains: all ranks send the same ones, and no bit depends on them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import AdamW, Policy, Scaling, Stepper, UnusableError, Wire
from tests.engine.observe import train
from tests.ranks.harness import run_ranks

STEPS = 5
CHOICE = {  # ranks, policy, wire
    "two ranks": (2, Policy.fp16(), Wire()),
    "two ranks, without overlap": (2, Policy.fp32(), Wire(overlap=False)),
    "three ranks, sums in fp32": (3, Policy.fp16(), Wire(sum="fp32")),
}
NO_CHOICE = {  # by ranks
    1: [(Policy.fp16(), Wire())],
    2: [(Policy.fp16(), Wire(bucket_bytes=1 << 20)), (Policy.fp16(), Wire(shard=True))],
    3: [(Policy.fp16(), Wire()), (Policy.fp32(), Wire(sum="fp32"))],
}


def network() -> nn.Module:
    """Matrices of 64 KB in half precision, with small ones in between: 24 to a few buckets of 1 MB."""
    torch.manual_seed(0)
    widths = [16, *([256, 128] * 12), 8]
    layers = [nn.Linear(one, two) for one, two in itertools.pairwise(widths)]
    return nn.Sequential(*(layer for each in layers for layer in (each, nn.Linear(each.out_features, 5))))


class Branching(nn.Module):
    """Runs each small layer beside the large one that it follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        aside = torch.zeros((), device=x.device)
        for large, small in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = torch.tanh(large(x))
            aside = aside + small(x).float().mean()
        return x + aside


def stepper_of(env: WorkerEnv, policy: Policy, wire: Wire) -> Stepper:
    scaling = Scaling(init=2**24, max=2**24) if policy.arithmetic == torch.float16 else None
    return Stepper(
        Branching(),
        AdamW(0.01),
        policy,
        env.group,
        scaling=scaling,
        wire=wire,
        clip_norm=0.5,
        reference_count=4,
    )


def trained(env: WorkerEnv, policy: Policy, wire: Wire, changing: bool) -> dict[str, object]:
    """The bits of some steps, with buckets of one size or of another one in each step."""
    stepper = stepper_of(env, policy, wire)
    generator = torch.Generator().manual_seed(env.rank)
    sizes, borders, reports = stepper.bucket_sizes(), set(), []
    for step in range(STEPS):
        if changing:
            stepper.set_bucket_bytes(sizes[step % len(sizes)])
        borders.add(tuple(len(bucket.message) for bucket in stepper.reducer.buckets))
        stepper.set_micro_batches(1 + (step > 2))
        x, classes = torch.randn(4, 16, generator=generator), torch.randint(8, (4,), generator=generator)
        reports.append(train(stepper, x, classes))
    return {
        "groupings": len(borders),
        "norms": [report.grad_norm for report in reports],
        "skipped": reports[-1].skipped_steps,
        "masters": [value.clone() for value in stepper.named_masters().values()],
    }


def with_both(env: WorkerEnv, policy: Policy, wire: Wire) -> list[dict[str, object]]:
    return [trained(env, policy, wire, changing) for changing in (False, True)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if "without" in case else case for case in CHOICE]
)
def test_no_bit_depends_on_the_size_of_the_buckets(case: str) -> None:
    world_size, policy, wire = CHOICE[case]
    for fixed, changing in run_ranks(world_size, with_both, policy, wire):
        assert fixed["groupings"] == 1
        assert changing["groupings"] >= 3
        assert fixed["norms"] == pytest.approx(changing["norms"], rel=0, abs=0, nan_ok=True)
        assert fixed["skipped"] == changing["skipped"]
        assert all(map(torch.equal, fixed["masters"], changing["masters"]))


def refusals(env: WorkerEnv, cases: list[tuple[Policy, Wire]]) -> list[tuple[list[int], str]]:
    found = []
    for policy, wire in cases:
        stepper = stepper_of(env, policy, wire)
        with pytest.raises(UnusableError) as caught:
            stepper.set_bucket_bytes(1 << 20)
        found.append((stepper.bucket_sizes(), str(caught.value)))
    return found


@pytest.mark.parametrize("world_size", NO_CHOICE)
def test_buckets_keep_their_size_where_bits_or_owners_depend_on_it(world_size: int) -> None:
    for found in run_ranks(world_size, refusals, NO_CHOICE[world_size]):
        for sizes, error in found:
            assert not sizes
            assert error == "bucket_bytes=1048576: it must be one of bucket_sizes(), which are []."
