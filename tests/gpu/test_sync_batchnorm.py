"""On a GPU: two ranks with model.sync_bn normalise by the statistics of both, with half weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from launcher.data.batch_plan import BatchPlan
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, Policy, Stepper
from launcher.trainer.builders.sync_batchnorm import synchronised
from tests.models import features, loss_sum
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.gpu
SAMPLES = 16


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)]
    return nn.Sequential(*layers)


def trained(env: WorkerEnv) -> dict[str, Tensor]:
    """Masters and buffers after three steps of SGD, each rank with its share of the samples."""
    device = torch.device("cuda", 0)
    model = conv_net().to(device)
    if env.group is not None:
        plan = BatchPlan(SAMPLES, SAMPLES, None, env.world_size, env.rank, 0, drop_last=True)
        model = synchronised(model, WorkerEnv(env.rank, env.world_size, 0, 1, device, env.group), plan)
    stepper = Stepper(model, SGD(0.1, momentum=0.9), Policy.fp16(), env.group)
    share = SAMPLES // env.world_size
    for step in range(3):
        x, classes = (
            each[env.rank * share :][:share].to(device) for each in features(SAMPLES, step, (3, 8, 8))
        )
        with stepper.forward():
            loss = loss_sum(model(x), classes)
        stepper.backward(loss, share)
        assert not stepper.step().read().skipped
    found = stepper.named_masters() | dict(model.named_buffers())
    return {name: value.float().cpu() for name, value in found.items()}


def test_two_ranks_train_as_one_process_with_the_whole_batch(device) -> None:
    if device.type == "cpu":
        pytest.skip("torch's SyncBatchNorm needs a GPU")
    (alone,), (one, other) = run_ranks(1, trained), run_ranks(2, trained)
    for name, value in alone.items():
        assert torch.equal(one[name], other[name]), name
        torch.testing.assert_close(one[name], value, rtol=2e-2, atol=2e-3, msg=name)
