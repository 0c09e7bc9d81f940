"""Parameter groups on several ranks: the same bits on every wire, a shard that begins within a group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.distributed.env import WorkerEnv
from launcher.engine import ParameterGroup, Policy, Stepper, UnusableError
from tests.engine.observe import train
from tests.engine.optim.test_groups import CASES, GROUPS, Grouped, batch
from tests.ranks.harness import run_ranks
from tests.ranks.test_all_wires import SMALL

STEPS = 6


def trained(group: dist.ProcessGroup | None, name: str, wire: str) -> tuple[dict[str, Tensor], bool]:
    """fp32, with the same samples on all ranks, resumed halfway; and whether a shard begins in a group."""
    arguments = (CASES[name][0], Policy.fp32(), group)
    options = {"ddp": SMALL[wire], "groups": GROUPS, "reference_count": 16, "clip_norm": 1.0}
    stepper = Stepper(Grouped(), *arguments, **options)
    for step in range(STEPS):
        if step == STEPS // 2:
            state = stepper.state().clone()
            stepper = Stepper(Grouped(), *arguments, **options)
            stepper.load(state)
        train(stepper, *batch(step))
    inside = any(
        stretch.start < part.start < stretch.stop
        for flat_buffer, part in stepper.zero1.places
        for group_slices in stepper.layout.group_slices(flat_buffer, slice(0, flat_buffer.numel)).values()
        for stretch in group_slices
    )
    return {name: value.clone() for name, value in stepper.named_masters().items()}, inside


def alone_and_together(env: WorkerEnv, name: str) -> list[tuple[dict[str, Tensor], bool]]:
    alone = dist.new_group([env.rank], use_local_synchronization=True)
    return [
        trained(alone, name, "native"),
        *(trained(env.group, name, wire) for wire in ("native", "sharded")),
    ]


@pytest.mark.parametrize(
    ("name", "world_size"), [("sgd", 2), pytest.param("adamw", 3, marks=pytest.mark.slow)]
)
def test_groups_are_updated_alike_whoever_owns_them(name, world_size) -> None:
    """Equal parts sum without rounding on two ranks: there the bits are those of one."""
    ranks = run_ranks(world_size, alone_and_together, name)
    assert any(rank[2][1] for rank in ranks), "no shard begins within a group"
    alone, first = ranks[0][0][0], ranks[0][1][0]
    for masters, _ in (wire for rank in ranks for wire in rank[1:]):
        for parameter, value in masters.items():
            assert torch.equal(value, first[parameter]), parameter
    for parameter, value in first.items():
        exact = torch.equal(value, alone[parameter])
        assert exact if world_size == 2 else torch.allclose(value, alone[parameter], atol=1e-5), parameter


def refused(env: WorkerEnv) -> str:
    own = [ParameterGroup("*.bias", weight_decay=0.0)] if env.rank else []
    with pytest.raises(UnusableError) as raised:
        Stepper(Grouped(), CASES["sgd"][0], group=env.group, groups=own)
    return str(raised.value)


def test_ranks_with_other_groups_are_refused() -> None:
    for text in run_ranks(2, refused):
        assert "on rank 1 groups is [ParameterGroup(match=('*.bias',), " in text
