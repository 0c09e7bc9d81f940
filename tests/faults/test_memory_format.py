"""A model that does not bear channels_last trains contiguous under auto."""

from __future__ import annotations

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


def prefer_channels_last() -> None:
    """As on CUDA: there is none here, and the rest of the choice is the same."""
    from launcher.trainer.builders import memory_format

    memory_format.FASTER_ON = ("cpu",)


def started(directory: Path, name: str, flat: str, *words: str) -> Ended:
    (directory / f"{name}.py").write_text(RECIPE.replace("FLAT", flat))
    words = f"recipes.path={directory / name}.py", "recipe.uses=images", "train.epochs=1", *words
    return run(directory / name, *words, ranks=2, prepare=prefer_channels_last)


def formats(ended: Ended) -> list[str]:
    return [event["text"] for event in ended.events("decision") if event["topic"] == "memory format"]


def test_under_auto_a_model_that_raises_trains_contiguous_and_it_is_said_once(tmp_path) -> None:
    ended = started(tmp_path, "viewed", VIEW)
    assert ended.codes == [0, 0], ended
    (text,) = formats(ended)
    assert text.startswith(
        "contiguous: in channels_last, which is faster, the recipe raises RuntimeError: view"
    )
    assert ended.digest == started(tmp_path, "plain", VIEW, "train.channels_last=false").digest


def test_under_auto_a_model_that_bears_it_trains_in_channels_last(tmp_path) -> None:
    ended = started(tmp_path, "flattened", FLATTEN)
    assert formats(ended) == ["channels_last"]
    assert ended.digest == started(tmp_path, "asked", FLATTEN, "train.channels_last=true").digest
