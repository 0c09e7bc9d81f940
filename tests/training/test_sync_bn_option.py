"""The option `model.sync_bn`: what two ranks train with it, by the command line, and which data it refuses.

What the module computes is in tests/ranks/test_sync_batchnorm_large_batch.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.data.batch_plan import BatchPlan
from launcher.errors import ConfigError
from launcher.run_dir.atomic import read_json
from launcher.training.setup.build import refuse_uneven_micro_batches
from tests.forked import launch_forked
from tests.test_end_to_end import launch

RECIPE = """
from torch import nn
from launcher.data.images.catalog import load_images
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


@pytest.mark.slow
def test_two_ranks_train_as_one_process(directory) -> None:
    losses = []
    for ranks, sync_bn in ((1, "false"), (2, "true"), (2, "false")):
        run_dir = directory / f"{ranks}-{sync_bn}"
        words = ["precision=fp32", "data.batch_size=64", "train.max_steps=30", "data.drop_last=true"]
        done = launch(directory, [*SMALL, *words, f"model.sync_bn={sync_bn}", f"run.dir={run_dir}"], ranks)
        assert done.returncode == 0, done.stderr
        losses.append(read_json(run_dir / "result.json")["metrics"]["loss"])
    one, synchronised, apart = losses
    assert synchronised == pytest.approx(one, rel=1e-5)
    assert apart != pytest.approx(one, rel=1e-3)


def test_ranks_that_would_wait_for_each_other_for_ever_are_refused(directory) -> None:
    words = ["launch.nproc=2", "data.batch_size=479", "data.micro_batch=160", "model.sync_bn=true"]
    done = launch_forked(directory, [*SMALL, *words])
    assert done.stderr.count("model.sync_bn=true needs equally many micro-batches on all ranks") == 1


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
