"""The option `model.sync_bn`: which devices, models and data it refuses.

What two ranks compute with it is in tests/gpu/test_sync_batchnorm.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from launcher.data.batch_plan import BatchPlan
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError
from launcher.trainer.builders.sync_batchnorm import refuse_uneven_micro_batches, synchronised
from tests.forked import launch_forked

RECIPE = """
from torch import nn
from launcher.data.images.registry import load_images
from launcher.recipe import Config, Recipe, cross_entropy, recipe


@recipe("small")
def small(config: Config) -> Recipe:
    images = load_images(config.data)
    return Recipe(
        build_model=lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
        ),
        train=images.train,
        validation=images.validation,
        loss=cross_entropy,
        train_transform=images.train_transform(config.data.augment),
        eval_transform=images.eval_transform(),
        classes=images.classes,
    )
"""
SMALL = ["recipe=resnet18", "recipe.uses=small", "recipes.path=small.py", "tracker=none"]


@pytest.fixture
def directory(tmp_path) -> Path:
    (tmp_path / "small.py").write_text(RECIPE)
    return tmp_path


def test_on_cpus_it_is_refused_before_the_first_step(directory) -> None:
    done = launch_forked(directory, [*SMALL, "launch.nproc=2", "model.sync_bn=true", "run.dir=run"])
    assert done.returncode == 2
    assert done.stderr.count("SyncBatchNorm expected input tensor to be on") == 1


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: torch's conversion would drop the activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def test_a_batch_norm_of_a_custom_class_is_refused() -> None:
    env = WorkerEnv(0, 2, 0, 2, torch.device("meta"), None)
    with pytest.raises(ConfigError, match=r"model.sync_bn=true: 0 is a WithActivation, whose arithmetic"):
        synchronised(nn.Sequential(WithActivation(3)), env, BatchPlan(64, 16, None, 2, 0, 0, False))


@pytest.mark.parametrize(
    ("samples", "batch", "micro", "world_size", "drop_last", "accepted"),
    [
        (100, 50, None, 4, False, True),
        (101, 50, None, 4, False, False),  # one sample for four ranks
        (101, 50, None, 4, True, True),
        (64, 16, 2, 3, False, True),  # 5, 5 and 6 samples: three passes each
        (64, 13, 2, 3, False, False),  # 4, 4 and 5 samples: two and three passes
    ],
)
def test_ranks_that_would_wait_for_ever_are_refused(
    samples, batch, micro, world_size, drop_last, accepted
) -> None:
    plan = BatchPlan(samples, batch, micro, world_size, 0, 0, drop_last)
    if accepted:
        refuse_uneven_micro_batches(plan)
    else:
        with pytest.raises(
            ConfigError, match=r"equally many micro-batches on all ranks, but the \d+ samples"
        ):
            refuse_uneven_micro_batches(plan)
