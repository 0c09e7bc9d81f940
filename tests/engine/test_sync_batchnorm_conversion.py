"""`synchronised(model)`: which modules of a model it replaces, what stays as it was, and what it refuses.

What the new modules compute is in tests/ranks/test_sync_batchnorm_large_batch.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed.process_group import WorkerEnv
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
