"""A recipe file of a user's own for the fault tests: tiny, and with everything that a run has to keep.

BatchNorm, dropout, noise from every generator and a counter that the forward pass depends on, so that
buffers, random states and the position in the data all change the weights. A few hundred parameters that
learn, some milliseconds a step. What a test wants to happen within it is `launching.USER_CODE`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from launcher.recipe import Batch, Config, Loss, Recipe, TensorData, cross_entropy, recipe
from tests.faults import launching

SAMPLES, FEATURES, CLASSES = 200, 6, 3


class Noisy(nn.Module):
    """[n, 6] features to 3 classes. `passes` counts the forward passes in training."""

    passes: Tensor

    def __init__(self, draws_after: int = 0) -> None:
        super().__init__()
        self.draws_after = draws_after  # passes: only later ones draw from Python's and NumPy's generators
        self.inner = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.outer = nn.Linear(16, CLASSES)
        self.ballast = nn.Parameter(torch.zeros(20_000), requires_grad=False)  # what a full disk cannot take
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.inner(x)))
        hidden = nn.functional.dropout(hidden, 0.2, self.training) * (1 + 0.1 * torch.sin(self.passes))
        if self.training:
            self.passes += 1
        if self.training and self.passes > self.draws_after:
            hidden = hidden * (1 + 0.1 * random.gauss(0, 1) + 0.1 * np.random.normal())
        logits: Tensor = self.outer(hidden)
        return logits


def loss(network: nn.Module, batch: Batch) -> Loss:
    launching.USER_CODE(network, batch)
    return cross_entropy(network, batch, inputs="x")


def with_noise(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] + 0.1 * torch.rand(len(batch["x"]), 1, device=batch["x"].device)}


class Indexed(Dataset[Batch]):
    """The samples of `data`, with noise of their own from the generators that augmentations draw from."""

    def __init__(self, data: TensorData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Batch:
        noise = 0.1 * (random.random() + np.random.rand() + torch.rand(()))
        sample = {name: column[index] for name, column in self.data.columns.items()}
        return {**sample, "x": sample["x"] + noise}


class Streamed(IterableDataset[Batch]):
    """The same samples in their order, as a stream."""

    def __init__(self, data: TensorData) -> None:
        self.indexed = Indexed(data)

    def __iter__(self) -> Iterator[Batch]:
        return (self.indexed[index] for index in range(len(self.indexed)))


@recipe("noisy_indexed")
def noisy_indexed(config: Config) -> Recipe:
    whole = noisy(config)
    return replace(whole, train=Indexed(whole.train), validation=Indexed(whole.validation))  # type: ignore[arg-type]


@recipe("noisy_streamed")
def noisy_streamed(config: Config) -> Recipe:
    whole = noisy(config)
    return replace(whole, train=Streamed(whole.train), validation=Streamed(whole.validation))  # type: ignore[arg-type]


@recipe("noisy")
def noisy(config: Config) -> Recipe:
    launching.USER_CODE(None, None)
    fixed = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES + 41, FEATURES, generator=fixed)
    label = (x[:, :CLASSES] + 0.5 * torch.randn(len(x), CLASSES, generator=fixed)).argmax(dim=1)
    columns = {"x": x, "label": label, "number": torch.arange(len(x))}
    return Recipe(
        build_model=Noisy,
        train=TensorData({name: column[:SAMPLES] for name, column in columns.items()}),
        validation=TensorData({name: column[SAMPLES:] for name, column in columns.items()}),
        loss=loss,
        train_transform=with_noise,
    )


@recipe("plain")
def plain(config: Config) -> Recipe:
    """A linear model that draws nothing: its step is the same however the batch is divided."""
    return replace(noisy(config), build_model=lambda: nn.Linear(FEATURES, CLASSES), train_transform=None)
