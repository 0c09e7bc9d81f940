"""A model that does not bear channels_last trains contiguous under auto, and is told of under true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.launching import Ended, run

pytestmark = pytest.mark.timeout(90)

RECIPE = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 6 * 6, 2)

    def forward(self, image):
        hidden = nn.functional.dropout(self.norm(self.convolution(image)).relu(), 0.1, self.training)
        return self.head(FLAT)

@recipe("images")
def images(config):
    data = TensorData({"image": torch.randn(32, 3, 6, 6), "label": torch.arange(32) % 2})
    return Recipe(Net, data, data, cross_entropy, classes=("a", "b"))
"""
VIEW, FLATTEN = "hidden.view(-1, 4 * 6 * 6)", "hidden.flatten(1)"
IN_METRIC = """
class Viewing:
    def reset(self): pass
    def update(self, outputs, batch): outputs.view(len(outputs), -1)
    def compute(self): return {"viewed": 1.0}

def maps(network, batch):
    found = network.convolution(batch["image"])
    return Loss(found.float().square().sum(), len(found), found)

def hook(model, position):
    return {"viewed": float(model.convolution(torch.ones(2, 3, 6, 6)).view(2, -1).mean())}

"""


def prefer_channels_last() -> None:
    """As on CUDA: there is none here, and the rest of the choice is the same."""
    from launcher.trainer.builders import memory_format

    memory_format.FASTER_ON = ("cpu",)


def started(directory: Path, name: str, flat: str, *words: str, recipe: str = RECIPE) -> Ended:
    (directory / f"{name}.py").write_text(recipe.replace("FLAT", flat))
    words = f"recipes.path={directory / name}.py", "recipe.uses=images", "train.epochs=1", *words
    return run(directory / name, *words, ranks=2, prepare=prefer_channels_last)


def formats(ended: Ended) -> list[str]:
    return [event["text"] for event in ended.events("decision") if event["topic"] == "memory format"]


@pytest.mark.slow
def test_under_auto_a_model_that_raises_trains_contiguous_and_it_is_said_once(tmp_path) -> None:
    ended = started(tmp_path, "viewed", VIEW)
    assert ended.codes == [0, 0], ended
    (text,) = formats(ended)
    assert text.startswith(
        "contiguous: in channels_last, which is faster, the recipe raises RuntimeError: view"
    )
    assert "viewed.py:15, in forward" in text
    assert ended.digest == started(tmp_path, "plain", VIEW, "train.channels_last=false").digest


def viewing(place: str) -> str:
    """A recipe whose loss returns the maps of a convolution, on which a metric or a hook calls view."""
    given = "metrics=[Viewing()], on_eval_end=" + ("hook" if place == "hook" else "None")
    recipe = RECIPE.replace("cross_entropy, classes", f"maps, {given}, classes")
    recipe = recipe.replace('@recipe("images")', f'{IN_METRIC}@recipe("images")')
    if place == "hook":
        recipe = recipe.replace("outputs.view(len(outputs), -1)", "pass")
    return recipe.replace("import Recipe", "import Loss, Recipe")


@pytest.mark.parametrize(("place", "function"), [("metric", "update"), ("hook", "hook")])
def test_a_view_in_a_metric_or_a_hook_is_found_too(tmp_path, place, function) -> None:
    ended = started(tmp_path, place, FLATTEN, recipe=viewing(place))
    assert ended.codes == [0, 0], ended
    (text,) = formats(ended)
    assert text.startswith("contiguous: in channels_last, which is faster, the recipe raises RuntimeError")
    assert re.search(rf"{place}\.py:\d+, in {function}", text), text
    assert ended.events("after_evaluation") or place == "metric"


def test_a_view_in_a_metric_under_true_ends_the_run_with_the_key(tmp_path) -> None:
    ended = started(tmp_path, "asked", FLATTEN, "train.channels_last=true", recipe=viewing("metric"))
    assert ended.codes == [2, 2], ended
    assert "train.channels_last=true: in this memory format the recipe raises RuntimeError: view" in str(
        ended
    )
    assert not ended.events("step")


def test_under_auto_a_model_that_bears_it_trains_in_channels_last(tmp_path) -> None:
    ended = started(tmp_path, "flattened", FLATTEN)
    assert formats(ended) == ["channels_last"]
    assert ended.digest == started(tmp_path, "asked", FLATTEN, "train.channels_last=true").digest


@pytest.mark.slow
def test_under_true_a_model_that_raises_ends_the_run_with_the_key(tmp_path) -> None:
    ended = started(tmp_path, "viewed", VIEW, "train.channels_last=true")
    assert ended.codes == [2, 2], ended
    assert "train.channels_last=true: in this memory format the recipe raises RuntimeError" in str(ended)
    assert not ended.events("step")
