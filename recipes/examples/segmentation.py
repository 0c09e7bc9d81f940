"""Segmentation: a class for each pixel, and a metric of one's own.

The loss sums over pixels and counts them, so that its mean is one per pixel whatever the batch. `MeanIoU` has
`merge`, so each rank measures its share and rank 0 adds the counts up.

    scripts/run recipe=recipes/examples/segmentation.py optim=adamw optim.lr=3e-3 data.batch_size=32 \
        train.epochs=3
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.recipe import Batch, Config, Loss, Recipe, TensorData, recipe

CLASSES = ("background", "disk", "square")
PIXELS = 32


@recipe
def segmentation(config: Config) -> Recipe:
    return Recipe(
        build_model=lambda: Segmenter(len(CLASSES)),
        train=shapes(640, seed=1),
        validation=shapes(160, seed=2),
        loss=pixel_loss,
        metrics=[MeanIoU(len(CLASSES))],
        monitor="mean_iou",
    )


def shapes(num_images: int, seed: int) -> TensorData:
    """Noisy images [n, 1, 32, 32] of a disk and a square each, and the class of each pixel [n, 32, 32]."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="ij")
    centres = torch.randint(6, PIXELS - 6, (num_images, 2, 2, 1, 1), generator=generator)
    radii = torch.randint(3, 7, (num_images, 2, 1, 1), generator=generator)
    away = torch.stack([rows - centres[:, :, 0], columns - centres[:, :, 1]])  # [2, n, 2, 32, 32]
    disk = away[:, :, 0].square().sum(dim=0) <= radii[:, 0].square()
    square = away[:, :, 1].abs().amax(dim=0) <= radii[:, 1]
    label = torch.where(square, 2, torch.where(disk, 1, 0))
    image = torch.tensor([0.0, 1.0, -1.0])[label] + 0.5 * torch.randn(label.shape, generator=generator)
    return TensorData({"image": image[:, None], "label": label})


class Segmenter(nn.Module):
    """images: float [n, 1, h, w] -> logits [n, classes, h, w]; h and w even"""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.coarse = nn.Sequential(
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
        )
        self.head = nn.Conv2d(48, num_classes, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        return self.head(torch.cat([fine, self.coarse(fine)], dim=1))


def pixel_loss(network: nn.Module, batch: Batch) -> Loss:
    logits = network(batch["image"]).float()
    loss_sum = F.cross_entropy(logits, batch["label"], reduction="sum")
    return Loss(loss_sum, batch["label"].numel(), logits.argmax(dim=1))


class MeanIoU:
    """Pixels on which prediction and label agree, over the pixels of either; the mean over the classes."""

    names = ("mean_iou",)
    higher_is_better = True

    def __init__(self, num_classes: int) -> None:
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)  # by label and prediction

    def update(self, outputs: Tensor, batch: Batch) -> None:
        pairs = (batch["label"] * len(self.counts) + outputs).flatten()
        counts = torch.bincount(pairs, minlength=self.counts.numel())
        self.counts = self.counts.to(counts.device) + counts.view_as(self.counts)

    def merge(self, other: MeanIoU) -> None:
        self.counts = self.counts + other.counts

    def compute(self) -> dict[str, float]:
        both = self.counts.diagonal()
        either = self.counts.sum(dim=0) + self.counts.sum(dim=1) - both
        return {"mean_iou": float((both / either)[either > 0].double().mean())}
