"""Photographs in a folder per class, read with PIL by a Dataset of one's own.

The Dataset reads and cuts: uint8 [3, side, side], a quarter of the bytes of fp32 on the way to the device,
where the transforms make fp32 of them. data=imagefolder does the same and more; this is the form to change.

    scripts/run recipe=recipes/examples/photographs.py data.path=DIR recipe.side=64 data.batch_size=32 \
        optim=adamw optim.lr=1e-3
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import Dataset

from launcher.recipe import Config, ConfigError, Recipe, columns, cross_entropy, recipe


@recipe
def photographs(config: Config, side: int = 128) -> Recipe:
    if config.data.path is None:
        raise ConfigError("photographs.py needs data.path=DIR, a folder with one folder per class.")
    # Sorted, because a directory lists its files in any order, and all ranks must agree.
    files = sorted(Path(config.data.path).glob("*/*.jpg"))
    classes = tuple(sorted({file.parent.name for file in files}))
    return Recipe(
        build_model=lambda: network(len(classes)),
        train=Photographs([file for i, file in enumerate(files) if i % 5], classes, side),
        validation=Photographs(files[::5], classes, side),  # every fifth
        collate=columns("image", "label"),  # names for the parts of a sample
        train_transform=mirrored,
        eval_transform=normalised,
        loss=cross_entropy,
        classes=classes,
    )


class Photographs(Dataset):
    """Sample i is (uint8 [3, side, side] in 0..255, class)."""

    def __init__(self, files, classes, side):
        self.files, self.classes, self.side = files, classes, side

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        with Image.open(file) as opened:
            image = ImageOps.fit(opened.convert("RGB"), (self.side, self.side))  # the middle, resized
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), self.classes.index(file.parent.name)


def normalised(batch):
    """The batch as `collate` made it, on the device: image uint8 [n, 3, side, side], label int64 [n]."""
    return {**batch, "image": (batch["image"].float() / 255 - 0.45) / 0.23}


def mirrored(batch):
    images = normalised(batch)["image"]
    flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return {**batch, "image": torch.where(flip, images.flip(3), images)}


def network(num_classes):
    """images: float [n, 3, h, w] -> logits [n, classes]"""
    layers = []
    for channels_in, channels in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(channels_in, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))
