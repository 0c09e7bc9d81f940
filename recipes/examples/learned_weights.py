"""Several losses, weighted by parameters that are learned with the network.

Which digit an image shows, and how much ink it has. The weights are those of Kendall, Gal and Cipolla:
Multi-Task Learning Using Uncertainty to Weigh Losses, 2018 (arXiv:1705.07115, equation 7). Each is exp(-s),
where s is the logarithm of the variance.

    scripts/run recipe=recipes/examples/learned_weights.py data=digits optim=adamw optim.lr=3e-3 \
        data.augment.random_crop_padding=0 train.epochs=5

A random crop would change the ink that is seen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.data import load_images
from launcher.recipe import (
    Batch,
    Classification,
    Config,
    Loss,
    ParameterGroup,
    Recipe,
    TensorData,
    recipe,
)


@recipe
def learned_weights(config: Config) -> Recipe:
    images = load_images(config.data)
    ink = ink_of(images.train)
    train, validation = (
        TensorData(data.columns | {"ink": (ink_of(data) - ink.mean()) / ink.std()}, data.name)
        for data in (images.train, images.validation)
    )
    pixels = images.channels * images.height * images.width
    return Recipe(
        build_model=lambda: TwoHeads(pixels, len(images.classes)),
        train=train,
        validation=validation,
        loss=weighted_loss,
        eval_transform=images.eval_transform(),
        train_transform=images.train_transform(config.data.augment),
        metrics=[Classification(images.classes, output="logits"), InkError()],
        monitor="accuracy",
        groups=[ParameterGroup("log_variances", weight_decay=0.0)],  # decay would pull the weights to 1
    )


def ink_of(data: TensorData) -> Tensor:
    """fp32 [n]: the mean of the pixels, 0 to 1."""
    return data.columns["image"].float().mean(dim=(1, 2, 3)) / 255


class TwoHeads(nn.Module):
    """images: float [n, c, h, w] -> logits [n, classes], ink [n]"""

    def __init__(self, num_pixels: int, num_classes: int, width: int = 128) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(num_pixels, width), nn.ReLU())
        self.digit = nn.Linear(width, num_classes)
        self.ink = nn.Linear(width, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))  # of digit and ink

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(images)
        return self.digit(features), self.ink(features)[:, 0]


class InkError:
    """`ink_error`: the mean absolute error, in standard deviations of the ink."""

    higher_is_better = False

    def __init__(self) -> None:
        self.error_sum, self.samples = 0.0, 0

    def update(self, outputs: dict[str, Tensor], batch: Batch) -> None:
        self.error_sum += float((outputs["ink"] - batch["ink"]).abs().sum())
        self.samples += len(batch["ink"])

    def merge(self, other: InkError) -> None:  # with it each rank updates its own
        self.error_sum += other.error_sum
        self.samples += other.samples

    def compute(self) -> dict[str, float]:
        return {"ink_error": self.error_sum / self.samples}


def weighted_loss(network: TwoHeads, batch: Batch) -> Loss:
    logits, ink = (each.float() for each in network(batch["image"]))
    digit_sum = F.cross_entropy(logits, batch["label"], reduction="sum")
    ink_sum = F.mse_loss(ink, batch["ink"], reduction="sum")
    s = network.log_variances.float()
    loss_sum = (-s[0]).exp() * digit_sum + 0.5 * (-s[1]).exp() * ink_sum + 0.5 * s.sum() * len(ink)
    return Loss(loss_sum, len(ink), {"logits": logits, "ink": ink})
