"""Several Steppers, interleaved as a GAN or an actor-critic does, with ranks that are idle."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, DDPOptions, Policy, Scaling, Stepper
from tests.ranks.harness import run_ranks

SHARED = "in one group, without overlap"
WIRES: dict[str, DDPOptions] = {
    "in groups of their own": DDPOptions(bucket_bytes=1),
    "in groups of their own, sharded": DDPOptions(bucket_bytes=1, shard_optimizer=True),
    SHARED: DDPOptions(bucket_bytes=1, overlap=False),
}
# A letter is a pass of that network, `/` its step.
ORDERS = {
    "one after the other": "a a/ b b/",
    "both passes first": "a b a/ b/",
    "both passes first, steps reversed": "a b b/ a/",
    "two passes of the discriminator": "b a b b/ a/",
    "three, like two critics and an actor": "a b c c/ a/ b/ c c/",
}
# Network and rank that has no samples in a step.
IDLE: dict[str, list[tuple[str, int]]] = {
    "none": [],
    "the last in the first network": [("a", -1)],
    "one each": [("a", 0), ("b", -1)],
    "the first in all": [("a", 0), ("b", 0), ("c", 0)],
}


class Three(nn.Module):
    """Two matrices of one shape and a vector: what is swapped with another network's is not noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4, 3))
        self.second = nn.Parameter(torch.zeros(4, 3))
        self.vector = nn.Parameter(torch.zeros(5))

    def forward(self, gradient: float, unused: bool) -> torch.Tensor:
        """Every derivative is `gradient`, but for those of `second` where that is not used."""
        used = [self.first, self.vector] + ([] if unused else [self.second])
        return torch.stack([p.float().sum() for p in used]).sum() * gradient


def gradient_of(name: str, rank: int, step: int) -> float:
    """A whole number of which the mean over one, two or three ranks is one."""
    return 6.0 * (1 + "abc".index(name)) * (1 + rank) * (1 + step)


def interleaved(
    groups: Mapping[str, Any], env: WorkerEnv, ddp: str, order: str, idle: str, reference_count: int | None
) -> None:
    """Two rounds of `order`; the masters of all networks are then what the gradients make of them."""
    words, ranks = ORDERS[order].split(), range(env.world_size)
    names = sorted({word[0] for word in words})
    steppers = {
        name: Stepper(
            Three(),
            SGD(1.0),
            Policy.fp16(),
            groups[name],
            ddp=WIRES[ddp],
            scaling=Scaling("static", 1),
            micro_batches=2,
            reference_count=reference_count,
        )
        for name in names
    }
    resting = {(name, rank % env.world_size) for name, rank in IDLE[idle]}
    active = {name: [rank for rank in ranks if (name, rank) not in resting] for name in names}
    arrived: dict[str, list[tuple[float, bool]]] = {name: [] for name in names}  # with whether all are used
    expected = {name: torch.zeros(2, dtype=torch.float64) for name in names}  # of `second`, of the others
    for step in range(2):
        for word in words:
            name, stepper = word[0], steppers[word[0]]
            if word.endswith("/"):
                count = len(arrived[name])
                report = stepper.step().read()
                assert (report.count, report.skipped) == (count, count == 0), (word, step, report.count)
                for gradient, all_used in arrived[name]:
                    expected[name] -= (
                        torch.tensor([gradient * all_used, gradient], dtype=torch.float64) / count
                    )
                arrived[name].clear()
                continue
            arrived[name] += [(gradient_of(name, rank, step), rank != 1) for rank in active[name]]
            if env.rank in active[name]:
                stepper.backward(stepper.model(gradient_of(name, env.rank, step), env.rank == 1), 1)
    for name, stepper in steppers.items():
        for parameter, master in stepper.named_masters().items():
            value = expected[name][0 if parameter == "second" else 1].float()
            assert torch.equal(master, torch.full_like(master, value)), (name, parameter, master, value)


def some(env: WorkerEnv, cases: list[Any]) -> list[str]:
    """The cases that went wrong, each with how."""
    # Where the other rank has no samples in the first step, none has a gradient of `second`.
    warnings.filterwarnings("ignore", ".* parameters received no gradient")
    found = []
    groups = {name: env.group if cases[0][0] == SHARED else dist.new_group() for name in "abc"}
    for case in cases:
        try:
            interleaved(groups, env, *case)
        except AssertionError as error:
            found.append(f"{case}: {error}")
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "ddp", [pytest.param(name, marks=[pytest.mark.slow] * (number > 0)) for number, name in enumerate(WIRES)]
)
def test_several_steppers_do_not_mix_their_messages(world_size, ddp) -> None:
    cases = [(ddp, order, idle, count) for order in ORDERS for idle in IDLE for count in (1, None)]
    assert run_ranks(world_size, some, cases) == [[]] * world_size


GAN = """
import torch
from launcher.engine import AdamW, DDPOptions, Stepper

ddp = {ddp}
generator = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
critic = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
for_generator, for_critic = (Stepper(each, AdamW(lr=1e-3), ddp=ddp) for each in (generator, critic))
cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
for inputs, _ in data:
    with for_critic.forward():
        fakes = generator(torch.randn(len(inputs), 8)).float()
        scores = critic(torch.cat([inputs, fakes.detach()])).float().flatten()
    is_real = (torch.arange(len(scores)) < len(inputs)).float()
    for_critic.backward(cross_entropy(scores, is_real, reduction="sum"), len(scores))
    for_critic.step()
    with for_generator.forward():
        scores = critic(fakes).float().flatten()              # computed again, because the critic has changed
    for_generator.backward(cross_entropy(scores, torch.ones_like(scores), reduction="sum"), len(scores))
    for_generator.step()
    critic.zero_grad()                                        # gradients of the generator's loss
"""


def trains_a_gan(env: WorkerEnv) -> list[torch.Tensor]:
    """In one group, without overlap, sharded and not: the masters of both networks, and their start."""
    found = []
    for options in ("overlap=False", "overlap=False, shard_optimizer=True"):
        for steps in (6, 0):
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(env.rank)
            data = [(torch.randn(8, 4, generator=generator), None) for _ in range(steps)]
            names: dict[str, Any] = {"data": data}
            exec(compile(GAN.replace("{ddp}", f"DDPOptions({options})"), "gan.py", "exec"), names)
            masters = [names[name].named_masters().values() for name in ("for_critic", "for_generator")]
            found += [torch.cat([master.flatten() for master in each]) for each in masters]
    return found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gan_in_one_group_trains_on_all_ranks_alike(world_size) -> None:
    first, *others = run_ranks(world_size, trains_a_gan)
    for other in others:
        assert all(map(torch.equal, first, other))
    for moved, start in zip(first[::4] + first[1::4], first[2::4] + first[3::4], strict=True):
        assert not torch.equal(moved, start)
