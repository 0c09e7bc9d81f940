"""A plain Dataset of torch with a transform of one's own, as most training scripts have it.

Each sample is a ring or a disk, drawn when it is read. The transform draws from torch, NumPy and Python as it
likes: before each micro-batch the launcher seeds all three, in the loader processes too, so that a resumed
run sees the same samples.

    scripts/run recipe=recipes/examples/dataset.py optim=adamw optim.lr=1e-2 data.batch_size=64 train.epochs=3
"""

import random

import torch
from torch import nn
from torch.utils.data import Dataset

from launcher.recipe import Config, Recipe, columns, cross_entropy, recipe

PIXELS = 16


@recipe
def dataset(config: Config) -> Recipe:
    return Recipe(
        build_model=network,
        train=Shapes(1024, transform=shift_and_noise),
        validation=Shapes(256),
        collate=columns("image", "label"),  # names for the parts of a sample
        loss=cross_entropy,
        classes=("disk", "ring"),
    )


class Shapes(Dataset):
    """Sample i is a disk or a ring of some radius: (fp32 [1, 16, 16], class)."""

    def __init__(self, num_samples, transform=None):
        self.num_samples = num_samples
        self.transform = transform

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        label, outer = index % 2, 3.5 + index % 5 * 0.5
        away = torch.arange(PIXELS) - (PIXELS - 1) / 2
        radius = (away[:, None].square() + away.square()).sqrt()
        image = ((radius <= outer) & (radius >= label * 2)).float()[None]
        return (self.transform(image) if self.transform else image), label


def shift_and_noise(image):
    """Moved by up to two pixels, with noise."""
    moved = image.roll((random.randint(-2, 2), random.randint(-2, 2)), dims=(1, 2))
    return moved + 0.3 * torch.randn(moved.shape)


def network():
    """images: float [n, 1, 16, 16] -> logits [n, 2]"""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 8 * 8, 2)
    )
