"""Label smoothing and mixup: what a loss is given, on any number of ranks, and which recipes are refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.config.groups import recipes_dir
from launcher.data.batch_plan import BatchPlan
from launcher.data.tensors import Batch, DeviceBatches, TensorData
from launcher.errors import ConfigError
from launcher.recipe import Config, Loss, Mixed, Recipe, class_loss, cross_entropy, load_recipe
from launcher.recipe.training_aids import (
    MIXED_LABEL,
    MIXED_SHARE,
    Mixup,
    refuse_split_pairs,
    with_training_aids,
)
from launcher.telemetry.event_log import read_events
from tests.configs import composed
from tests.forked import launch_forked

LABELS = torch.tensor([0, 2, 1, 1, 0])


def config_of(label_smoothing: float = 0.0, mixup: float = 0.0) -> Config:
    config = composed()
    augment = dataclasses.replace(config.data.augment, mixup=mixup)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, augment=augment),
        train=dataclasses.replace(config.train, label_smoothing=label_smoothing),
    )


def recipe_of(loss: Callable[..., Loss] = cross_entropy, column: str = "image") -> Recipe:
    data = TensorData({column: torch.randn(5, 4), "label": LABELS})
    return Recipe(lambda: nn.Linear(4, 3), data, data, loss, classes=("a", "b", "c"))


def test_mixed_and_smoothed_labels_give_the_loss_of_their_probabilities() -> None:
    logits, share = torch.randn(5, 3), torch.rand(5)
    mixed = Mixed(LABELS.flip(0), share)
    own, other = F.one_hot(LABELS, 3), F.one_hot(mixed.labels, 3)
    expected = share[:, None] * own + (1 - share[:, None]) * other
    for smoothing in (0.0, 0.2):
        smoothed = (1 - smoothing) * expected + smoothing / 3
        wanted = F.cross_entropy(logits, smoothed, reduction="sum")
        torch.testing.assert_close(class_loss(logits, LABELS, smoothing, mixed), wanted)
        plain = F.cross_entropy(logits, LABELS, reduction="sum", label_smoothing=smoothing)
        assert torch.equal(class_loss(logits, LABELS, smoothing), plain)


def test_an_evaluation_measures_the_plain_loss() -> None:
    network, batch = nn.Linear(4, 3), {"image": torch.randn(5, 4), "label": LABELS}
    recipe = with_training_aids(recipe_of(), config_of(label_smoothing=0.3))
    logits = network(batch["image"])
    smoothed = F.cross_entropy(logits, LABELS, reduction="sum", label_smoothing=0.3)
    assert torch.equal(recipe.loss(network, batch).sum, smoothed)
    network.eval()
    assert torch.equal(recipe.loss(network, batch).sum, F.cross_entropy(logits, LABELS, reduction="sum"))


def test_without_aids_the_recipe_is_as_it_was() -> None:
    recipe = recipe_of()
    assert with_training_aids(recipe, config_of()) is recipe


def without_arguments(network: nn.Module, batch: Batch) -> Loss:
    return cross_entropy(network, batch)


def with_smoothing(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Loss:
    return cross_entropy(network, batch, label_smoothing=label_smoothing)


@pytest.mark.parametrize(
    ("recipe", "aids", "text"),
    [
        (
            recipe_of(without_arguments),
            {"label_smoothing": 0.1},
            "train.label_smoothing=0.1: the rec",
        ),
        (recipe_of(without_arguments), {"mixup": 0.2}, "without_arguments, has no argument mixed"),
        (recipe_of(max), {"mixup": 0.2}, "max, has no argument mixed"),  # of C, without a signature
        (recipe_of(with_smoothing), {"mixup": 0.2}, "data.augment.mixup=0.2: the recipe's loss"),
        (recipe_of(column="x"), {"mixup": 0.2}, "the training set has no column image"),
        (dataclasses.replace(recipe_of(), classes=None), {"mixup": 0.2}, "the recipe has no classes"),
    ],
)
def test_a_recipe_that_could_not_use_an_aid_is_refused(recipe, aids, text) -> None:
    with pytest.raises(ConfigError, match=text):
        with_training_aids(recipe, config_of(**aids))


@pytest.mark.parametrize("loss", [with_smoothing, functools.partial(cross_entropy, inputs="image")])
def test_any_loss_that_names_the_argument_is_given_it(loss) -> None:
    recipe = with_training_aids(recipe_of(loss), config_of(label_smoothing=0.3))
    network, batch = nn.Linear(4, 3), {"image": torch.randn(5, 4), "label": LABELS}
    assert recipe.loss(network, batch).sum != loss(network, batch).sum


def test_the_loss_of_the_page_takes_part_in_both() -> None:
    page = (recipes_dir() / "README.md").read_text()
    code = page[page.index("from launcher.recipe import Batch, Loss, Mixed") :].partition("```")[0]
    names: dict[str, Callable[..., Loss]] = {}
    exec(code, names)
    recipe = with_training_aids(recipe_of(names["my_loss"]), config_of(0.1, 0.2))
    network, batch = nn.Linear(4, 3), {"image": torch.randn(5, 4), "label": LABELS}
    assert recipe.train_transform is not None
    mixed = recipe.train_transform(batch, torch.rand(5, 4))
    aided = recipe.loss(network, mixed)
    assert aided.sum != names["my_loss"](network, {"image": mixed["image"], "label": LABELS}).sum


def training_batches(world_size: int, micro_batch: int | None = None, epoch: int = 1) -> list[Batch]:
    """Of all ranks in order, joined by step."""
    generator = torch.Generator().manual_seed(0)
    data = TensorData(
        {
            "image": torch.randint(256, (31, 1, 4, 4), generator=generator).byte(),
            "label": torch.arange(31) % 7,
        }
    )

    def augmented(batch: Batch, noise: Tensor) -> Batch:
        return {**batch, "image": batch["image"].float() + noise[:, :1, None, None]}

    found = []
    for step in range(3):
        parts = []
        for rank in range(world_size):
            plan = BatchPlan(31, 12, micro_batch, world_size, rank, seed=3, drop_last=False)
            parts += DeviceBatches(data, plan, Mixup(0.4, "label", augmented)).step(epoch, step)
        found.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return found


def test_the_same_samples_are_mixed_on_any_number_of_ranks() -> None:
    alone = training_batches(1)
    for world_size, micro_batch in ((2, None), (3, None), (1, 2), (2, 2)):
        for step in (0, 1):  # the last one, of 7, cannot be divided into pairs
            found = training_batches(world_size, micro_batch)[step]
            assert found.keys() == alone[step].keys()
            assert all(torch.equal(column, alone[step][name]) for name, column in found.items())
    again = training_batches(1, epoch=2)
    assert not torch.equal(again[0][MIXED_SHARE], alone[0][MIXED_SHARE])


def test_neighbours_are_mixed_by_their_share() -> None:
    batch = {"image": torch.randn(5, 1, 2, 2), "label": LABELS}
    noise = torch.rand(5, 4)
    mixed = Mixup(1.0, "label", None)(dict(batch), noise)
    share = mixed[MIXED_SHARE]
    assert torch.equal(mixed["label"], LABELS)
    assert torch.equal(mixed[MIXED_LABEL], LABELS[[1, 0, 3, 2, 4]])
    torch.testing.assert_close(share, noise[[0, 0, 2, 2, 4], 3], atol=2e-4, rtol=0)  # Beta(1, 1) is uniform
    weight, partner = share.view(-1, 1, 1, 1), batch["image"][[1, 0, 3, 2, 4]]
    torch.testing.assert_close(mixed["image"], weight * batch["image"] + (1 - weight) * partner)
    assert torch.equal(mixed["image"][4], batch["image"][4])


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 8.0])
def test_the_shares_are_those_of_the_beta_distribution(alpha) -> None:
    noise = torch.rand(20_000, 4, generator=torch.Generator().manual_seed(0))
    batch = {"image": torch.zeros(20_000, 1), "label": torch.zeros(20_000, dtype=torch.int64)}
    share = Mixup(alpha, "label", None)(batch, noise)[MIXED_SHARE].double()
    assert 0 <= float(share.min()) <= float(share.max()) <= 1
    assert float(share.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(share.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        (BatchPlan(100, 32, None, 2, 0, 0, drop_last=False), False),
        (BatchPlan(99, 32, None, 1, 0, 0, drop_last=False), False),
        (BatchPlan(99, 33, None, 1, 0, 0, drop_last=False), False),
        (BatchPlan(99, 32, None, 2, 0, 0, drop_last=False), True),
        (BatchPlan(99, 32, None, 2, 0, 0, drop_last=True), False),
        (BatchPlan(99, 30, None, 2, 0, 0, drop_last=True), True),
        (BatchPlan(96, 32, None, 3, 0, 0, drop_last=False), True),
        (BatchPlan(96, 32, 11, 1, 0, 0, drop_last=False), True),
        (BatchPlan(96, 32, 8, 1, 0, 0, drop_last=False), False),
    ],
)
def test_pairs_must_not_be_split(plan, refused) -> None:
    refuse_split_pairs(plan, 0.0, 100)
    if not refused:
        refuse_split_pairs(plan, 0.2, 100)
        return
    with pytest.raises(ConfigError, match=r"mixup=0.2 mixes samples in pairs, but .* odd number"):
        refuse_split_pairs(plan, 0.2, 100)


def test_an_odd_rest_that_the_run_never_reaches_is_allowed() -> None:
    plan = BatchPlan(99, 32, None, 2, 0, 0, drop_last=False)
    refuse_split_pairs(plan, 0.2, total_steps=plan.steps_per_epoch - 1)
    with pytest.raises(ConfigError, match="step 4 of an epoch has an odd number"):
        refuse_split_pairs(plan, 0.2, total_steps=plan.steps_per_epoch)


@pytest.mark.slow
def test_a_run_is_the_same_on_one_two_and_three_ranks(tmp_path: Path) -> None:
    words = ["recipe=cnn", "data=digits", "precision=fp32", "tracker=none", "data.batch_size=96"]
    words += ["data.drop_last=true", "data.augment.mixup=0.4", "data.augment.crop_padding=1"]
    words += ["train.label_smoothing=0.1", "train.epochs=2"]
    losses = []
    for ranks in (1, 2, 3):
        run = [f"run.dir={tmp_path / str(ranks)}", f"launch.nproc={ranks}"]
        done = launch_forked(tmp_path, [*words, *run])
        assert done.returncode == 0, done.stderr
        events = read_events(tmp_path / str(ranks) / "metrics.jsonl")
        (*_, last) = (event for event in events if event["event"] == "eval")
        losses.append(last["loss"])
        assert "train_accuracy" not in last
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-4)


def test_the_image_recipes_take_both() -> None:
    words = ("data.augment.mixup=0.2", "train.label_smoothing=0.1")
    recipe = load_recipe(composed("recipe=cnn", "data=digits", *words))
    assert isinstance(recipe.train_transform, Mixup)
    assert recipe.loss is not cross_entropy
