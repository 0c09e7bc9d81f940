"""Label smoothing: what a loss is given, and which recipes are refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from launcher.config.groups import recipes_dir
from launcher.data.tensors import Batch, TensorData
from launcher.errors import ConfigError
from launcher.recipe import Config, Loss, Recipe, class_loss, cross_entropy, load_recipe
from launcher.recipe.label_smoothing import with_label_smoothing
from tests.configs import composed

LABELS = torch.tensor([0, 2, 1, 1, 0])


def config_of(label_smoothing: float = 0.0) -> Config:
    config = composed()
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, label_smoothing=label_smoothing)
    )


def recipe_of(loss: Callable[..., Loss] = cross_entropy, column: str = "image") -> Recipe:
    data = TensorData({column: torch.randn(5, 4), "label": LABELS})
    return Recipe(lambda: nn.Linear(4, 3), data, data, loss, classes=("a", "b", "c"))


def test_smoothed_labels_give_the_loss_of_their_probabilities() -> None:
    logits = torch.randn(5, 3)
    for smoothing in (0.0, 0.2):
        smoothed = (1 - smoothing) * F.one_hot(LABELS, 3) + smoothing / 3
        wanted = F.cross_entropy(logits, smoothed, reduction="sum")
        torch.testing.assert_close(class_loss(logits, LABELS, smoothing), wanted)


def test_an_evaluation_measures_the_plain_loss() -> None:
    network, batch = nn.Linear(4, 3), {"image": torch.randn(5, 4), "label": LABELS}
    recipe = with_label_smoothing(recipe_of(), config_of(label_smoothing=0.3))
    logits = network(batch["image"])
    smoothed = F.cross_entropy(logits, LABELS, reduction="sum", label_smoothing=0.3)
    assert torch.equal(recipe.loss(network, batch).sum, smoothed)
    network.eval()
    assert torch.equal(recipe.loss(network, batch).sum, F.cross_entropy(logits, LABELS, reduction="sum"))


def test_without_aids_the_recipe_is_as_it_was() -> None:
    recipe = recipe_of()
    assert with_label_smoothing(recipe, config_of()) is recipe


def without_arguments(network: nn.Module, batch: Batch) -> Loss:
    return cross_entropy(network, batch)


def with_smoothing(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Loss:
    return cross_entropy(network, batch, label_smoothing=label_smoothing)


@pytest.mark.parametrize("loss", [without_arguments, max])  # max is of C, without a signature
def test_a_loss_that_could_not_use_it_is_refused(loss) -> None:
    with pytest.raises(ConfigError, match=r"train\.label_smoothing=0\.1: the recipe's loss, .*no argument"):
        with_label_smoothing(recipe_of(loss), config_of(0.1))


@pytest.mark.parametrize("loss", [with_smoothing, functools.partial(cross_entropy, inputs="image")])
def test_any_loss_that_names_the_argument_is_given_it(loss) -> None:
    recipe = with_label_smoothing(recipe_of(loss), config_of(label_smoothing=0.3))
    network, batch = nn.Linear(4, 3), {"image": torch.randn(5, 4), "label": LABELS}
    assert recipe.loss(network, batch).sum != loss(network, batch).sum


def test_the_loss_of_the_page_takes_it() -> None:
    page = (recipes_dir() / "README.md").read_text()
    code = page[page.index("from launcher.recipe import Batch, Loss, class_loss") :].partition("```")[0]
    names: dict[str, Callable[..., Loss]] = {}
    exec(code, names)
    recipe = with_label_smoothing(recipe_of(names["my_loss"]), config_of(0.1))
    network, batch = nn.Linear(4, 3), {"image": torch.randn(5, 4), "label": LABELS}
    assert recipe.loss(network, batch).sum != names["my_loss"](network, batch).sum


def test_the_image_recipes_take_it() -> None:
    recipe = load_recipe(composed("recipe=cnn", "data=digits", "train.label_smoothing=0.1"))
    assert recipe.loss is not cross_entropy
