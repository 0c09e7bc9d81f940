"""Sets of photographs of any size as map-style data sets.

Owns what a sample is made of: the region that is cut from a photograph, or from its decoded pixels where
`data.cache` asked for a cache, resized to `image_size`. Never lists files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch

from launcher.config.constraints import Constraint, is_whole, number
from launcher.data.images.cache import DecodedImages
from launcher.data.images.image_file import center_crop, channels_first, cut, random_resized_crop, read_crop
from launcher.data.images.image_index import ImageIndex
from launcher.data.options import Cache

BASE_OVER_CROP = 256 / 224  # the usual resize before a centre crop

Pixels = Annotated[
    int,
    Constraint("a whole number of 1 to 4096 pixels", lambda value: is_whole(value) and 1 <= value <= 4096),
]
Share = Annotated[float, number("above 0 and at most 1", lambda value: 0 < value <= 1)]
Sample = dict[str, Any]


@dataclass(frozen=True)
class ImageOptions:
    """How photographs become images of the model."""

    image_size: Pixels = 224  # height and width that the model sees
    crop_scale: Share = 0.08  # the smallest share of the area that a training crop takes
    cache: Cache = "none"

    @property
    def base_size(self) -> int:
        """The shorter side of a decoded image in the cache, in pixels."""
        return round(self.image_size * BASE_OVER_CROP)


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """The photographs at `indices`, as the samples of a training or of an evaluation.

    A sample is {"image": uint8 [3, image_size, image_size], "label": int}: for training a random region of
    the photograph, mirrored for half of them; for an evaluation its middle.
    """

    name: str
    index: ImageIndex
    indices: Sequence[int]
    options: ImageOptions
    decoded: DecodedImages | None
    training: bool
    flip: bool  # half of the training images

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width that the model sees."""
        return 3, self.options.image_size, self.options.image_size

    def __getitem__(self, index: int) -> Sample:
        number, side = self.indices[index], self.options.image_size
        region = partial(random_resized_crop, smallest=self.options.crop_scale)
        choose = region if self.training else center_crop(1 / BASE_OVER_CROP)
        image = None if self.decoded is None else self.decoded[number]
        if image is None:
            pixels = read_crop(*self.index.source(number), choose, side)
        else:
            pixels = channels_first(np.asarray(cut(image, choose, side)))
        if self.training and self.flip and torch.rand(()) < 0.5:
            pixels = np.ascontiguousarray(pixels[:, :, ::-1])
        return {"image": torch.from_numpy(pixels), "label": self.index.labels[number]}

    def fingerprint(self) -> str:
        """Digest of what ranks must have in common; their paths and times may differ."""
        digest = hashlib.sha256()
        for index in self.indices:
            text = f"{self.index.identity(index)}\0{self.index.labels[index]}\n"
            digest.update(text.encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]
