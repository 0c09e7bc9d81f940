"""`recipe=cifar_fast`: its whitening layer, its loss, and that it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from launcher.errors import ConfigError
from launcher.recipe import load_recipe, registry_of
from tests.configs import composed
from tests.forked import launch_forked

CIFAR10 = Path(__file__).parents[2].parent / "shared" / "data" / "cifar10"
SYNTHETIC = ["recipe=cifar_fast", "data=synthetic", "data.image_size=12", "model.width=8"]


def small_recipe():
    return load_recipe(composed(*SYNTHETIC, "data.num_samples=320", "data.val_fraction=0.1"))


def test_the_first_layer_whitens_patches_and_is_not_trained() -> None:
    recipe = small_recipe()
    network = recipe.build_model()
    assert next(name for name, p in network.named_parameters() if not p.requires_grad) == "whiten.weight"
    images = recipe.eval_transform({"image": recipe.train.columns["image"]})["image"]
    with torch.no_grad():
        responses = network.whiten(images).transpose(0, 1).flatten(1)[:12]  # [filters of one sign, patches]
    covariance = responses @ responses.T / responses.shape[1]
    assert torch.allclose(covariance, torch.eye(12), atol=0.05)
    weight = network.whiten.weight
    assert torch.equal(weight[:12], -weight[12:])


def test_the_size_of_the_network() -> None:
    build = registry_of(None).models["fast_net"]
    network = build(10, 3, torch.zeros(12, 3, 2, 2))
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(2.0e6, rel=0.03)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert network(torch.zeros(2, 3, 9, 40)).shape == (2, 10)


def test_labels_are_smoothed_in_training_only_and_evaluations_see_the_mirror_image() -> None:
    recipe = small_recipe()
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 10))
    images, labels = torch.randn(4, 3, 12, 12), torch.arange(4)
    of_training = recipe.loss(network, {"image": images, "label": labels})
    smoothed = F.cross_entropy(network(images), labels, reduction="sum", label_smoothing=0.2)
    assert torch.equal(of_training.sum, smoothed)
    network.eval()
    seen, mirrored = (recipe.loss(network, {"image": x, "label": labels}) for x in (images, images.flip(3)))
    assert torch.allclose(seen.outputs, mirrored.outputs)
    assert torch.equal(seen.sum, F.cross_entropy(seen.outputs, labels, reduction="sum"))
    assert (seen.count, of_training.count) == (4, 4)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["data=digits"], "data=digits has 8 x 8"),
        (["data=synthetic", "data.image_size=8"], "data=synthetic has 8 x 8"),
    ],
)
def test_small_images_are_refused(words, found) -> None:
    with pytest.raises(ConfigError, match=rf"at least 9 x 9 pixels, and {found}"):
        load_recipe(composed("recipe=cifar_fast", *words))


def test_a_width_is_a_number_of_channels() -> None:
    with pytest.raises(ConfigError, match=r"model\.width=0"):
        load_recipe(composed(*SYNTHETIC, "model.width=0")).build_model()


def test_a_few_steps_learn_simple_images(tmp_path) -> None:
    words = [*SYNTHETIC, "data.num_samples=400", "data.num_classes=4", "train.epochs=4", "tracker=none"]
    plain = ["data.augment.crop_padding=0", "data.augment.flip=false", "data.batch_size=32", "optim.lr=0.2"]
    done = launch_forked(tmp_path, [*words, *plain, "launch.nproc=1", "run.dir=run"])
    assert done.returncode == 0, done.stderr
    assert "cuda graph none: it runs on the device cpu" in done.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["metric"] > 0.7


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not CIFAR10.is_dir(), reason=f"needs the real CIFAR-10 in {CIFAR10}")
def test_two_epochs_of_a_fifth_of_cifar10_learn(tmp_path) -> None:
    """At a quarter of the width: about 190 s of one core, and 62 %."""
    pq = pytest.importorskip("pyarrow.parquet")
    for name, rows in (("train", 10_000), ("test", 2_000)):
        pq.write_table(
            pq.read_table(CIFAR10 / f"{name}.parquet").slice(0, rows), tmp_path / f"{name}.parquet"
        )
    words = [
        "recipe=cifar_fast",
        f"data.path={tmp_path}",
        "data.cache=none",
        "model.width=16",
        "train.epochs=2",
    ]
    fixed = ["data.batch_size=100", "optim.lr=0.6", "launch.nproc=1", "tracker=none", "run.dir=run"]
    done = launch_forked(tmp_path, [*words, *fixed], timeout_s=800, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["metric"] > 0.5
