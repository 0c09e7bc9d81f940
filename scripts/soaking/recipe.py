"""The recipe of the soak test, as user code: tiny, with every kind of state that a run must keep.

It has BatchNorm, dropout, augmentation noise, a counter and a sum over each rank's samples. The forward pass
depends on the last two, so buffers, random states and the position in the data all affect the weights. One
training sample is NaN: the step with it is skipped once an epoch, on all runs alike, so all runs end with the
same bits.

A file `slow-rank<k>` in the working directory makes rank k sleep once, for the seconds that the file
contains.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from launcher.recipe import Batch, Config, Loss, Recipe, TensorData, cross_entropy, recipe

SAMPLES, FEATURES, CLASSES = 392, 6, 3
POISONED = 7  # the NaN sample
STEP_S = 0.03  # steps last long enough for faults to hit them, without using the processor
BALLAST = 350_000  # fp32 values: 1.4 MB, more than any other file of the run


class Noisy(nn.Module):
    """[n, 6] features to 3 classes. `passes` counts forward passes in training, `seen` sums their input."""

    passes: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.outer = nn.Linear(16, CLASSES)
        self.ballast = nn.Parameter(torch.zeros(BALLAST), requires_grad=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.inner(x)))
        hidden = nn.functional.dropout(hidden, 0.2, self.training) * (1 + 0.1 * torch.sin(self.passes))
        hidden = hidden * (1 + 0.1 * torch.sin(self.seen))
        if self.training:
            self.passes += 1
            self.seen += x.detach().float().mean()
        logits: Tensor = self.outer(hidden)
        return logits


def loss(network: nn.Module, batch: Batch) -> Loss:
    if network.training:
        time.sleep(STEP_S)
        be_slow_if_asked()
    return cross_entropy(network, batch, inputs="x")


def be_slow_if_asked() -> None:
    marker = Path(f"slow-rank{os.environ.get('RANK', '0')}")
    with contextlib.suppress(FileNotFoundError):
        seconds = float(marker.read_text())
        marker.unlink()
        time.sleep(seconds)


def with_noise(batch: Batch) -> Batch:
    return {**batch, "x": batch["x"] + 0.1 * torch.rand(len(batch["x"]), 1, device=batch["x"].device)}


@recipe("soak")
def soak(config: Config) -> Recipe:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES + 41, FEATURES, generator=random)
    label = (x[:, :CLASSES] + 0.5 * torch.randn(len(x), CLASSES, generator=random)).argmax(dim=1)
    x[POISONED] = float("nan")
    return Recipe(
        build_model=Noisy,
        train=TensorData({"x": x[:SAMPLES], "label": label[:SAMPLES]}),
        validation=TensorData({"x": x[SAMPLES:], "label": label[SAMPLES:]}),
        loss=loss,
        train_transform=with_noise,
    )
