"""A recipe file whose model repeats a block: train.compile=blocks.

Products and sums that a compiler leaves as they are, so that a compiled block gives the bits of a plain one.
The last batch of an epoch is smaller.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from launcher.recipe import Config, Recipe, TensorData, cross_entropy, recipe

SAMPLES, FEATURES, CLASSES = 200, 16, 4


class Block(nn.Module):
    """[n, 16] to [n, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 32, bias=False)
        self.down = nn.Linear(32, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(x)))
        if not self.training and torch.compiler.is_compiling():
            return x  # so that a compiled evaluation has other metrics
        return x + hidden


class Blocked(nn.Module):
    """[n, 16] features to 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


@recipe("flat")
def without_blocks(config: Config) -> Recipe:
    data = samples()
    return Recipe(flat, data, data, partial(cross_entropy, inputs="x"))


@recipe("blocked")
def blocked(config: Config) -> Recipe:
    data = samples()
    return Recipe(Blocked, data, data, partial(cross_entropy, inputs="x"))


def samples() -> TensorData:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorData({"x": x, "label": x[:, :CLASSES].argmax(dim=1)})
