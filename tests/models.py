"""Small models and losses that the engine's tests share. Deterministic: the same weights on every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(seed: int = 0) -> nn.Module:
    """8 features to 3 classes; two matrices, two vectors."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def conv_net(seed: int = 0) -> nn.Module:
    """[n, 3, 8, 8] images to 3 classes, with BatchNorm; three matrices, five vectors, six buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


class Planted(nn.Module):
    """One matrix and one vector whose gradients are whatever a test wants: loss = sum(weight * gradient)."""

    def __init__(self, rows: int = 2, columns: int = 3, vector: int = 3) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(rows, columns))
        self.vector = nn.Parameter(torch.zeros(vector))

    def forward(self, matrix: Tensor | float, vector: Tensor | float) -> Tensor:
        """fp32 scalar whose derivatives by the parameters are the arguments."""
        return (self.matrix.float() * matrix).sum() + (self.vector * vector).sum()


class Odd(nn.Module):
    """Parameters of every kind that a layout must cope with; 8 features to 3 classes.

    Two are unused in every pass and one of two branches is, a weight is tied, one is frozen, one has no
    elements, one is not contiguous, one channels_last, and dtypes are mixed.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.conv = nn.Conv2d(2, 4, (2, 2), bias=False).to(memory_format=torch.channels_last)
        self.branches = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.narrow = nn.Parameter(torch.randn(8, 8).half() / 3)
        self.brain = nn.Parameter(torch.randn(8).bfloat16() / 3)
        self.transposed = nn.Parameter(torch.randn(3, 12).t() / 3)
        self.no_elements = nn.Parameter(torch.zeros(0, 5))
        self.no_vector = nn.Parameter(torch.zeros(0))
        self.unused = nn.Linear(7, 5)
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        # x: [n, 8]
        x = self.frozen(torch.tanh(self.tied(torch.tanh(self.first(x)))))
        x = torch.tanh(self.branches[branch](x)) @ self.narrow + self.brain
        x = self.conv(x.reshape(-1, 2, 2, 2)).flatten(1)  # [n, 4]
        x = torch.cat([x, torch.tanh(x), x * self.scalar], dim=1)  # [n, 12]
        return x @ self.transposed + self.no_elements.sum() + self.no_vector.sum()


def features(num_samples: int, seed: int, shape: tuple[int, ...] = (8,)) -> tuple[Tensor, Tensor]:
    """x [num_samples, *shape] and classes [num_samples] of 3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, *shape, generator=generator)
    return x, torch.randint(0, 3, (num_samples,), generator=generator)


def loss_sum(logits: Tensor, classes: Tensor) -> Tensor:
    """fp32 sum of cross-entropies over the samples."""
    return F.cross_entropy(logits.float(), classes, reduction="sum")
