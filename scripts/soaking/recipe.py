"""The recipe of the soak, as user code: tiny, and with everything that a run has to keep.

BatchNorm, dropout, augmentation noise, a counter and a sum over each rank's own samples, on both of which the
forward pass depends: so buffers, random states and the position in the data all change the weights. One
training sample is not a number: the step whose batch holds it is skipped, once an epoch, on whichever rank
gets it. That is a part of the data, the same in the undisturbed run and in the others, so all of them end
with the same bits.

A file `slow-rank<k>` in the working directory makes rank k sleep once, for as many seconds as it says.
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
POISONED = 7  # the sample that is not a number
STEP_S = 0.03  # so long that faults fall into steps, without taking the processor for it
BALLAST = 350_000  # fp32 values: 1.4 MB, more than any other file of the run


class Noisy(nn.Module):
    """[n, 6] features to 3 classes. `passes` counts the passes in training, `seen` sums up their input."""

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


def with_noise(batch: Batch, noise: Tensor) -> Batch:
    return {**batch, "x": batch["x"] + 0.1 * noise[:, :1]}


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
