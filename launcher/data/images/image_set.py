"""Images as a recipe gets them: two sets, the classes, and the transforms of a batch on the device.

Owns normalisation and the augmentation of images in memory. Where sets come from is in `catalog`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.config.schema import AugmentConfig
from launcher.data.images.photograph_set import (
    MEAN,
    STD,
    Listing,
    PhotographOptions,
    PhotographSet,
    photograph_transform,
)
from launcher.data.tensors import Batch, TensorData

Constants = tuple[float, ...]  # one per channel, for pixels in 0..1


@dataclass(frozen=True)
class ImageSet:
    """Columns "image" (uint8 [n, c, h, w]) and "label" (int64 [n]), split for training and validation.

    Either both sets are in memory or both are photographs that loader processes decode.
    """

    train: TensorData | PhotographSet
    validation: TensorData | PhotographSet
    classes: tuple[str, ...]
    mean: Constants
    std: Constants

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour images."""
        return self._shape[0]

    @property
    def height(self) -> int:
        """Height of the images in pixels, as the model sees them."""
        return self._shape[1]

    @property
    def width(self) -> int:
        """Width of the images in pixels, as the model sees them."""
        return self._shape[2]

    @property
    def _shape(self) -> tuple[int, ...]:
        if isinstance(self.train, PhotographSet):
            return self.train.shape
        return tuple(self.train.columns["image"].shape[1:])

    def train_transform(self, augment: AugmentConfig) -> Callable[[Batch, Tensor], Batch]:
        """(batch, noise fp32 [n, >= 3]) -> batch with randomly cropped, mirrored, normalised fp32 images."""
        if isinstance(self.train, PhotographSet):
            return photograph_transform(Normalise(self.mean, self.std), self.height)
        normalise = self.eval_transform()

        def transform(batch: Batch, noise: Tensor) -> Batch:
            image = crop_and_flip(batch["image"], noise, augment.crop_padding, augment.flip)
            return normalise({**batch, "image": image})

        return transform

    def eval_transform(self) -> Callable[[Batch], Batch]:
        """batch -> the same with normalised fp32 images."""
        return NormaliseBatch(Normalise(self.mean, self.std))


def photographs(name: str, listing: Listing, options: PhotographOptions) -> ImageSet:
    """The set of a listing, with one cache for both parts."""
    cache = options.open_cache(listing)
    indices = range(len(listing.labels))
    parts = (indices[: listing.num_train], True), (indices[listing.num_train :], False)
    train, validation = (
        PhotographSet(name, listing, part, options, cache, training) for part, training in parts
    )
    return ImageSet(train, validation, listing.classes, MEAN, STD)


@dataclass(frozen=True)
class NormaliseBatch:
    """batch -> the same with normalised fp32 images."""

    normalise: Normalise

    def __call__(self, batch: Batch) -> Batch:
        return {**batch, "image": self.normalise(batch["image"])}

    @property
    def normalisation(self) -> dict[str, Constants]:
        """What is done to pixels in 0..1, for who predicts with the weights."""
        return {"mean": self.normalise.mean, "std": self.normalise.std}


def crop_and_flip(images: Tensor, noise: Tensor, padding: int, flip: bool) -> Tensor:
    """Random crops of images [n, c, h, w] padded with zeros, mirrored for half of them, in one gather.

    noise [n, >= 3] in [0, 1): vertical offset, horizontal offset, mirrored if below 1/2.
    """
    if padding == 0 and not flip:
        return images
    count, channels, height, width = images.shape
    device = images.device
    padded = F.pad(images, (padding,) * 4)
    # floor(u * k) < k for every fp32 u < 1: the product rounds down below k
    offsets = (noise[:, :2] * (2 * padding + 1)).long()  # [n, 2]
    rows = offsets[:, :1] + torch.arange(height, device=device)  # [n, h]
    columns = torch.arange(width, device=device).expand(count, width)  # [n, w]
    if flip:
        columns = torch.where(noise[:, 2:3] < 0.5, width - 1 - columns, columns)
    columns = offsets[:, 1:] + columns
    sample = torch.arange(count, device=device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(1, -1, 1, 1)
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True)
class Normalise:
    """uint8 images [n, c, h, w] -> fp32 with the set's mean 0 and standard deviation 1 per channel."""

    mean: Constants
    std: Constants
    _on_device: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, images: Tensor) -> Tensor:
        scale, shift = self._constants(images.device)
        return images.float().mul_(scale).add_(shift)

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # cached: a copy from the host in every step would synchronize with the device
        if device not in self._on_device:
            mean, std = torch.tensor([self.mean, self.std]).view(2, -1, 1, 1).to(device)
            self._on_device[device] = (1 / (255 * std), -mean / std)
        return self._on_device[device]
