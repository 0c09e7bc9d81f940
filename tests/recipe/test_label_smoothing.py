"""Label smoothing: what a loss is given, and which recipes are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from launcher.config.groups import recipes_dir
from launcher.data.tensors import Batch
from launcher.recipe import Loss, class_loss, cross_entropy, load_recipe
from launcher.recipe.contract import with_label_smoothing
from tests.configs import composed

LABELS = torch.tensor([0, 2, 1, 1, 0])


def test_smoothed_labels_give_the_loss_of_their_probabilities() -> None:
    logits = torch.randn(5, 3)
    for smoothing in (0.0, 0.2):
        smoothed = (1 - smoothing) * F.one_hot(LABELS, 3) + smoothing / 3
        wanted = F.cross_entropy(logits, smoothed, reduction="sum")
        torch.testing.assert_close(class_loss(logits, LABELS, smoothing), wanted)


def test_an_evaluation_measures_the_plain_loss() -> None:
    network, batch = nn.Linear(4, 3), {"image": torch.randn(5, 4), "label": LABELS}
    loss = with_label_smoothing(cross_entropy, 0.3)
    logits = network(batch["image"])
    smoothed = F.cross_entropy(logits, LABELS, reduction="sum", label_smoothing=0.3)
    assert torch.equal(loss(network, batch).sum, smoothed)
    network.eval()
    assert torch.equal(loss(network, batch).sum, F.cross_entropy(logits, LABELS, reduction="sum"))


def test_without_smoothing_the_loss_is_as_it_was() -> None:
    assert with_label_smoothing(cross_entropy, 0.0) is cross_entropy


def with_smoothing(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Loss:
    return cross_entropy(network, batch, label_smoothing=label_smoothing)


@pytest.mark.parametrize("loss", [with_smoothing, functools.partial(cross_entropy, inputs="image")])
def test_any_loss_that_names_the_argument_is_given_it(loss) -> None:
    network, batch = nn.Linear(4, 3), {"image": torch.randn(5, 4), "label": LABELS}
    assert with_label_smoothing(loss, 0.3)(network, batch).sum != loss(network, batch).sum


def test_the_loss_of_the_page_takes_it() -> None:
    page = (recipes_dir() / "README.md").read_text()
    code = page[page.index("from launcher.recipe import Batch, Loss, class_loss") :].partition("```")[0]
    names: dict[str, Callable[..., Loss]] = {}
    exec(code, names)
    loss = with_label_smoothing(names["my_loss"], 0.1)
    network, batch = nn.Linear(4, 3), {"image": torch.randn(5, 4), "label": LABELS}
    assert loss(network, batch).sum != names["my_loss"](network, batch).sum


def test_the_image_recipes_take_it() -> None:
    recipe = load_recipe(composed("recipe=cnn", "data=digits", "train.label_smoothing=0.1"))
    assert recipe.loss is not cross_entropy
