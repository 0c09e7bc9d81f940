"""Images as a recipe gets them: two sets, the classes, and the transforms of a batch on the device.

Owns which transforms a set has. What they do is in `data.augment`, where sets come from in `catalog`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from launcher.config.schema import AugmentConfig
from launcher.data.augment import Constants, Normalise, NormaliseBatch, crop_and_flip, photograph_transform
from launcher.data.images.photograph_set import (
    MEAN,
    STD,
    Listing,
    PhotographOptions,
    PhotographSet,
)
from launcher.data.tensors import Batch, TensorData


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
