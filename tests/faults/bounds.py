"""Recipes whose steps are bound by one part each: data, computation, update, overhead."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from launcher.recipe import Batch, Config, Loss, Recipe, TensorData, cross_entropy, recipe

SAMPLE_S = 0.002  # that a sample of the slow set takes


class Slow(Dataset[Batch]):
    """Samples that take their time, on one rank or on all."""

    def __init__(self, *ranks: int) -> None:
        self.delays = not ranks or int(os.environ.get("RANK", "0")) in ranks

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> Batch:
        if self.delays:
            time.sleep(SAMPLE_S)
        return {"image": torch.full((8,), index / 320), "label": torch.tensor(index % 2)}


class Rows(nn.Module):
    """A table of which a step reads a few rows, and updates all."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(rows, 64))
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        # x: [n, 8]
        logits: Tensor = self.head(self.table[: len(x)].float() + x.sum(1, keepdim=True))
        return logits


def classes_of(num: int, width: int) -> TensorData:
    x = torch.randn(num, width, generator=torch.Generator().manual_seed(0))
    return TensorData({"image": x, "label": (x[:, 0] > 0).long()})


def recipe_of(model: nn.Module, train: object) -> Recipe:
    return Recipe(lambda: model, train, classes_of(16, 8), loss)  # type: ignore[arg-type]


def loss(network: nn.Module, batch: Batch) -> Loss:
    """The 8 columns of a sample are repeated for a wider model."""
    width = next((each.in_features for each in network.children() if isinstance(each, nn.Linear)), 8)
    repeated = batch["image"].repeat(1, width // 8) if isinstance(network, nn.Sequential) else batch["image"]
    return cross_entropy(network, {**batch, "image": repeated})


@recipe("slow_set")
def slow_set(config: Config) -> Recipe:
    return recipe_of(nn.Linear(8, 2), Slow())


@recipe("slow_set_of_rank_1")
def slow_set_of_rank_1(config: Config) -> Recipe:
    return recipe_of(nn.Linear(8, 2), Slow(1))


class SlowLayer(nn.Linear):
    """Takes its time in the forward pass of rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1" and self.training:
            time.sleep(0.02)
        return super().forward(x)


@recipe("slow_layers_of_rank_1")
def slow_layers_of_rank_1(config: Config) -> Recipe:
    return recipe_of(SlowLayer(8, 2), classes_of(2048, 8))


@recipe("large")
def large(config: Config) -> Recipe:
    layers = [layer for _ in range(3) for layer in (nn.Linear(768, 768), nn.ReLU())]
    return recipe_of(nn.Sequential(*layers, nn.Linear(768, 2)), classes_of(2048, 8))


@recipe("table")
def table(config: Config) -> Recipe:
    return recipe_of(Rows(60_000), classes_of(2048, 8))


@recipe("wide")
def wide(config: Config) -> Recipe:
    return recipe_of(Rows(16_000), classes_of(2048, 8))


@recipe("half_a_megabyte")
def half_a_megabyte(config: Config) -> Recipe:
    """On the wire, in fp16."""
    return recipe_of(Rows(4_000), classes_of(2048, 8))


@recipe("tiny")
def tiny(config: Config) -> Recipe:
    return recipe_of(nn.Linear(8, 2), classes_of(2048, 8))
