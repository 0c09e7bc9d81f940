"""`synchronised(model)`: which modules of a model it replaces, what stays as it was, and what it refuses.

What the new modules compute is in tests/ranks/test_sync_batchnorm_large_batch.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed.env import WorkerEnv
from launcher.engine.sync_batchnorm import SyncBatchNorm, synchronised
from tests.ranks.harness import run_ranks


class Own(nn.BatchNorm2d):
    pass


class Shared(nn.Module):
    """One batch norm at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Linear(4, 4), self.first, nn.BatchNorm1d(4, affine=False))


def convert(env: WorkerEnv) -> list[str]:
    """Problems found."""
    group = dist.new_group()
    model = Shared().eval()
    names = [*model.state_dict()]
    before = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    model = synchronised(model, group)
    after = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    problems = []
    problems += [] if [*model.state_dict()] == names else ["names or their order"]
    problems += [] if before == after else ["other tensors"]
    problems += [] if model.first is model.inner[1] else ["not shared any more"]
    problems += [] if isinstance(model.inner[2], SyncBatchNorm) else ["not converted"]
    problems += ["training"] if model.first.training else []
    x = torch.randn(1, 4)
    expected = nn.BatchNorm1d(4).eval()(x)
    problems += [] if torch.equal(model.first(x), expected) else ["evaluation differs, or communicates"]
    alone = synchronised(nn.BatchNorm2d(3), group)
    problems += [] if isinstance(alone, SyncBatchNorm) else ["a bare batch norm"]
    try:
        alone(torch.zeros(2, 4, 1, 1))
        problems.append("wrong channels were taken")
    except ValueError as error:
        problems += [] if "[n, 3, ...]" in str(error) else [str(error)]
    try:
        synchronised(nn.Sequential(nn.Linear(2, 2), Own(3)), group)
        problems.append("a class of somebody's own was taken")
    except ValueError as error:
        problems += [] if "1 is a Own" in str(error) else [str(error)]
    dist.barrier(group)  # who leaves earlier may take the connection from who is still making it
    return problems


def test_parameters_names_sharing_and_mode_survive_the_exchange() -> None:
    assert run_ranks(2, convert) == [[], []]


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.InstanceNorm2d])
def test_other_norms_stay(kind) -> None:
    model = nn.Sequential(nn.Linear(2, 2), kind(4, 4))
    assert type(synchronised(model, None)[1]) is kind


@pytest.mark.parametrize("present", [("weight", "bias"), ("weight",), ()])
def test_it_trains_with_a_weight_or_a_bias_or_neither(present) -> None:
    """From torch 2.12 on a batch norm may have a weight and no bias."""
    plain, converted = (nn.BatchNorm1d(4, affine="weight" in present) for _ in range(2))
    if present == ("weight",):
        plain.bias = converted.bias = None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        inputs = [torch.arange(12.0).reshape(3, 4).square().requires_grad_() for _ in range(2)]
        for norm, x in zip((plain, synchronised(converted, group)), inputs, strict=True):
            norm(x).pow(3).sum().backward()
    finally:
        dist.destroy_process_group()
    for name in present:
        assert torch.allclose(getattr(plain, name).grad, getattr(converted, name).grad, rtol=1e-4)
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-5)
