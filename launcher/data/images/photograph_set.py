"""Sets of photographs of any size as map-style data sets, and their transforms on the device.

Owns what a sample is made of. With a cache (`data.cache` auto or a folder) it is the square in the middle of
the photograph, resized once to 256/224 of `image_size`, and the region that the device cuts from it. Without
one it is the region that a loader process cuts from the photograph itself. Never lists files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from launcher.config.rules import Rule, is_whole, number
from launcher.config.schema import DataConfig
from launcher.data.images.cache import ImageCache
from launcher.data.images.folder import FolderListing
from launcher.data.images.hugging_face import HubListing
from launcher.data.images.photograph import DRAWS, UInt8Array, centre, random_region, read_photograph
from launcher.data.options import Cache
from launcher.data.reader import stacked
from launcher.data.tensors import Batch
from launcher.errors import ConfigError, DataError

BASE_OVER_CROP = 256 / 224  # the usual resize before a centre crop

Pixels = Annotated[
    int, Rule("a whole number of 1 to 4096 pixels", lambda value: is_whole(value) and 1 <= value <= 4096)
]
Share = Annotated[float, number("above 0 and at most 1", lambda value: 0 < value <= 1)]
Sample = dict[str, Any]
Listing = FolderListing | HubListing  # all photographs of a set, by index: those for training first


@dataclass(frozen=True)
class PhotographOptions:
    """How photographs become images of the model."""

    image_size: Pixels = 224  # height and width that the model sees
    crop_scale: Share = 0.08  # the smallest share of the area that a training crop takes
    cache: Cache = "auto"

    @property
    def base_size(self) -> int:
        """Height and width of a cached image, of which the evaluation sees the middle."""
        return round(self.image_size * BASE_OVER_CROP)


def refuse_padding(config: DataConfig) -> None:
    """Raise ConfigError for the augmentation of images of one size."""
    if config.augment.crop_padding:
        raise ConfigError(
            f"data.augment.crop_padding={config.augment.crop_padding} must be 0 for photographs, of which "
            "random regions are cut. Set data.crop_scale, the smallest share of the area, instead."
        )


@dataclass(frozen=True, eq=False)
class PhotographSet:
    """The photographs at `indices`, as the samples of a training or of an evaluation.

    A sample is {"image": uint8 [3, h, w], "label": int}; one for training that comes from the cache has
    "region" too: fp32 [5], left, top, width and height in pixels of the image, and 1 where it is mirrored.

    Where the recipe has no collate a loader process hands over `reference`, a number in place of an image
    that is in the cache, and the process that trains calls `complete`. To send the image through shared
    memory takes longer than to read it: new memory for each batch, zeroed and mapped page by page in both.
    """

    name: str
    listing: Listing
    indices: Sequence[int]
    options: PhotographOptions
    cache: ImageCache | None
    training: bool
    flip: bool  # half of the training images

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width that the model sees."""
        return 3, self.options.image_size, self.options.image_size

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index, torch.default_generator)

    def sample(self, index: int, generator: torch.Generator) -> Sample:
        """The sample, with its region and mirroring drawn from `generator`."""
        return self._with_pixels(self.reference(index, generator))

    def reference(self, index: int, generator: torch.Generator) -> Sample:
        """The sample; of an image that is in the cache "stored", its number there, in place of the image."""
        number = self.indices[index]
        label = self.listing.labels[number]
        draws = torch.rand(DRAWS + 1, generator=generator).tolist() if self.training else []
        if self.options.cache == "none":
            return {"image": torch.from_numpy(self._cut(number, draws)), "label": label}
        sample = {**self._stored_or_decoded(number), "label": label}
        if self.training:
            size = self.options.base_size
            region = random_region(size, size, draws, self.options.crop_scale)
            mirrored = float(self.flip and draws[DRAWS] < 0.5)
            sample["region"] = torch.tensor([*region, mirrored])
        return sample

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """The batch, by reference if all are: with "stored", int64 [n], in place of "image"."""
        whole = all("stored" in sample for sample in samples)
        batch: Batch = stacked(samples if whole else [self._with_pixels(sample) for sample in samples])
        return batch

    def complete(self, batch: Batch, pinned: bool) -> Batch:
        """The batch with "image", uint8 [n, 3, h, w], in place of "stored"; pinned for a GPU to copy from."""
        if "stored" not in batch:
            return batch
        assert self.cache is not None
        rest = {name: column for name, column in batch.items() if name != "stored"}
        return {"image": self._seen(self.cache.gather(batch["stored"], pinned)).contiguous(), **rest}

    def _with_pixels(self, sample: Sample) -> Sample:
        if "stored" not in sample:
            return sample
        assert self.cache is not None
        rest = {name: value for name, value in sample.items() if name != "stored"}
        image = self._seen(torch.from_numpy(self.cache.get(sample["stored"])))
        # What is written into the mapping would be in this sample for as long as the process lives.
        return {"image": image.clone(), **rest}

    def _seen(self, images: Tensor) -> Tensor:
        """What a sample has of cached images [..., 3, base_size, base_size]: the middle in an evaluation."""
        if self.training:
            return images
        margin = (self.options.base_size - self.options.image_size) // 2
        end = margin + self.options.image_size
        return images[..., margin:end, margin:end]

    def fingerprint(self) -> str:
        """Digest of what ranks must have in common; their paths and times may differ."""
        digest = hashlib.sha256()
        for index in self.indices:
            text = f"{self.listing.identity(index)}\0{self.listing.labels[index]}\n"
            digest.update(text.encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]

    @property
    def labels(self) -> list[int]:
        """The class of each sample."""
        return [self.listing.labels[index] for index in self.indices]

    def _cut(self, number: int, draws: Sequence[float]) -> UInt8Array:
        """The region from the photograph itself: uint8 [3, image_size, image_size]."""
        source, name = self.listing.source(number)
        size = self.options.image_size
        region = partial(random_region, draws=draws, smallest=self.options.crop_scale)
        image = read_photograph(source, name, region if self.training else centre(1 / BASE_OVER_CROP), size)
        mirrored = self.training and self.flip and draws[DRAWS] < 0.5
        return np.ascontiguousarray(image[:, :, ::-1]) if mirrored else image

    def _stored_or_decoded(self, number: int) -> Sample:
        """The square in the middle: uint8 [3, base_size, base_size], or "stored" where the cache has it."""
        cache = self.cache
        if cache is not None and cache.expect(number):
            return {"stored": number}
        source, name = self.listing.source(number)
        try:
            base = read_photograph(source, name, centre(1.0), self.options.base_size)
        except DataError:
            if cache is not None:
                cache.give_up(number)
            raise
        if cache is not None:
            cache.put(number, base)
            if cache.expect(number):
                return {"stored": number}
        return {"image": self._seen(torch.from_numpy(base))}
