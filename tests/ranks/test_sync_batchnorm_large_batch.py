"""Synchronised batch norm on real ranks computes what one process computes with the large batch.

Outputs, gradients and statistics of the module, and the weights of a short training. The conversion of
models: tests/engine/test_sync_batchnorm_conversion.py. The option: tests/training/test_sync_bn_option.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, Policy, Stepper
from launcher.engine.sync_batchnorm import synchronised
from tests.engine.observe import train
from tests.models import conv_net, features
from tests.ranks.harness import run_ranks

SIZES = [3, 1, 4, 2]  # samples per rank: one of them alone could not be normalised
KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


def data(dimensions: int, samples: int) -> tuple[Tensor, Tensor]:
    """Input with a large mean, where a difference of squares would lose the variance; and a weight."""
    generator = torch.Generator().manual_seed(dimensions)
    shape = (samples, 5, *[3] * (dimensions - 1))
    return 300 + torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def norm(dimensions: int, momentum: float | None) -> nn.Module:
    module = KINDS[dimensions](5, momentum=momentum)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2, 5))
        module.bias.copy_(torch.linspace(-1, 1, 5))
    return module


def passes(module: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Two training passes; the last one's output and gradients, and the buffers after both."""
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        output = module(leaf)
        (output * weight).sum().backward()
    found = {"output": output.detach(), "input": leaf.grad}
    found |= {f"grad {name}": p.grad for name, p in module.named_parameters()}
    return found | dict(module.named_buffers())


def on_a_rank(env: WorkerEnv, dimensions: int, momentum: float | None) -> dict[str, Tensor]:
    start = sum(SIZES[: env.rank])
    share = slice(start, start + SIZES[env.rank])
    x, weight = data(dimensions, sum(SIZES[: env.world_size]))
    return passes(synchronised(norm(dimensions, momentum), dist.new_group()), x[share], weight[share])


@pytest.mark.parametrize(
    ("world_size", "dimensions", "momentum"), [(2, 1, 0.1), (3, 2, 0.3), (4, 3, None), (2, 4, 0.1)]
)
def test_outputs_gradients_and_statistics_are_those_of_the_large_batch(
    world_size, dimensions, momentum
) -> None:
    ranks = run_ranks(world_size, on_a_rank, dimensions, momentum)
    x, weight = data(dimensions, sum(SIZES[:world_size]))
    exact = passes(norm(dimensions, momentum).double(), x.double(), weight.double())
    for name, expected in exact.items():
        parts = [found[name] for found in ranks]
        if name in ("output", "input"):
            whole = torch.cat(parts)
        elif name.startswith("grad"):
            whole = torch.stack(parts).sum(0)
        else:
            whole = parts[0]
            assert all(torch.equal(part, whole) for part in parts), name
        torch.testing.assert_close(
            whole.double(), expected.double(), rtol=2e-3, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def in_a_subgroup(env: WorkerEnv) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Ranks 0 and 2 together, rank 1 alone; and what one process makes of the same samples."""
    groups = {members: dist.new_group(list(members)) for members in ((0, 2), (1,))}
    (members,) = (members for members in groups if env.rank in members)
    x, weight = data(2, 6)
    share = slice(3 * members.index(env.rank), 3 * members.index(env.rank) + 6 // len(members))
    found = passes(synchronised(norm(2, 0.1), groups[members]), x[share], weight[share])
    return found, passes(norm(2, 0.1).double(), x.double(), weight.double())


def test_only_the_ranks_of_its_group_take_part() -> None:
    ranks = run_ranks(3, in_a_subgroup)
    for name in ("output", "input"):
        together, exact = torch.cat([ranks[0][0][name], ranks[2][0][name]]), ranks[0][1][name]
        for found in (together, ranks[1][0][name]):
            torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)
    assert torch.equal(ranks[0][0]["running_var"], ranks[2][0]["running_var"])


def trained(env: WorkerEnv, policy: Policy, synchronise: bool) -> dict[str, Tensor]:
    """Masters and buffers after some steps on this rank's part of one data set."""
    model = conv_net()
    if synchronise and env.group is not None:
        model = synchronised(model, dist.new_group())
    stepper = Stepper(model, SGD(0.1, 0.9), policy, env.group, reference_count=8)
    for step in range(5):
        x, classes = features(8, step, (3, 8, 8))
        share = slice(8 * env.rank // env.world_size, 8 * (env.rank + 1) // env.world_size)
        assert not train(stepper, x[share], classes[share]).skipped
    return {**stepper.named_masters(), **dict(model.named_buffers())}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any element."""
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("policy", "limit"), [(Policy.fp32(), 1e-5), (Policy.fp16(), 5e-3)], ids=["fp32", "fp16"]
)
def test_training_on_ranks_is_training_on_one(policy: Policy, limit: float) -> None:
    (alone,) = run_ranks(1, trained, policy, False)
    together = run_ranks(2, trained, policy, True)[0]
    apart = run_ranks(2, trained, policy, False)[0]
    assert distance(together, alone) < limit
    assert distance(apart, alone) > 2 * limit  # without it they do not: the comparison can fail
