"""Image sets by name, as uint8 tensors in memory, and the transforms of a batch on the device.

Owns the source of each set (`digits`, `synthetic`, `cifar10`), the split of sets that come without one,
normalisation and augmentation. Never communicates: every rank loads the same set. `launcher.data.parquet`
reads the parquet files.
"""

from __future__ import annotations

import difflib
import gzip
import importlib.util
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.config.schema import AugmentConfig, DataConfig
from launcher.data.batch_plan import generator_for
from launcher.data.parquet import load_parquet_splits
from launcher.data.tensors import Batch, TensorData
from launcher.errors import ConfigError, PreflightError

DIGITS_MAXIMUM = 16  # the set counts dark pixels of 4 x 4 blocks

Constants = tuple[float, ...]  # one per channel, for pixels in 0..1


@dataclass(frozen=True)
class ImageSet:
    """Columns "image" (uint8 [n, c, h, w]) and "label" (int64 [n]), split for training and validation."""

    train: TensorData
    validation: TensorData
    classes: tuple[str, ...]
    mean: Constants
    std: Constants

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour images."""
        return self.train.columns["image"].shape[1]

    @property
    def height(self) -> int:
        """Height of the images in pixels."""
        return self.train.columns["image"].shape[2]

    @property
    def width(self) -> int:
        """Width of the images in pixels."""
        return self.train.columns["image"].shape[3]

    def train_transform(self, augment: AugmentConfig) -> Callable[[Batch, Tensor], Batch]:
        """(batch, noise fp32 [n, >= 3]) -> batch with randomly cropped, mirrored, normalised fp32 images."""
        normalise = self.eval_transform()

        def transform(batch: Batch, noise: Tensor) -> Batch:
            image = crop_and_flip(batch["image"], noise, augment.crop_padding, augment.flip)
            return normalise({**batch, "image": image})

        return transform

    def eval_transform(self) -> Callable[[Batch], Batch]:
        """batch -> the same with normalised fp32 images."""
        normalise = Normalise(self.mean, self.std)
        return lambda batch: {**batch, "image": normalise(batch["image"])}


def load_images(config: DataConfig) -> ImageSet:
    """Load the set `config.name`. Raises ConfigError for a wrong config, DataError for unusable data."""
    if config.name not in IMAGE_SETS:
        nearest = difflib.get_close_matches(config.name, IMAGE_SETS, n=1)
        advice = f"Did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(
            f"data.name={config.name} is not a known image set. {advice}Known: {', '.join(IMAGE_SETS)}."
        )
    images = IMAGE_SETS[config.name](config)
    train, validation = (replace(each, name=config.name) for each in (images.train, images.validation))
    return replace(images, train=train, validation=validation)


def digits(config: DataConfig) -> ImageSet:
    """1,797 handwritten digits of 8 x 8 pixels, one channel, from a file in scikit-learn."""
    _refuse_path(config, "comes with scikit-learn")
    _check_options(config, {})
    table = _digits_table()
    pixels = np.rint(table[:, :-1] * (255 / DIGITS_MAXIMUM)).astype(np.uint8)
    images = torch.from_numpy(pixels).view(-1, 1, 8, 8)
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    train, validation = split(TensorData({"image": images, "label": labels}), config.val_fraction)
    return ImageSet(train, validation, tuple("0123456789"), mean=(0.3053,), std=(0.3761,))


def synthetic(config: DataConfig) -> ImageSet:
    """Learnable images of any size: a fixed pattern per class plus noise of equal amplitude."""
    _refuse_path(config, "is generated")
    sizes = _check_options(config, {"num_samples": 2048, "num_classes": 10, "channels": 3, "image_size": 32})
    size, channels = sizes["image_size"], sizes["channels"]
    generator = generator_for("synthetic", *sizes.values())
    patterns = _bytes_below_128(generator, sizes["num_classes"], channels, size, size)
    noise = _bytes_below_128(generator, sizes["num_samples"], channels, size, size)
    labels = torch.arange(sizes["num_samples"]) % sizes["num_classes"]
    data = TensorData({"image": noise.add_(patterns[labels]), "label": labels})
    classes = tuple(f"class{index}" for index in range(sizes["num_classes"]))
    train, validation = split(data, config.val_fraction)
    # the sum of two uniform numbers below 1/2: mean 1/2, variance 2 * (1/2)^2 / 12
    return ImageSet(train, validation, classes, mean=(0.5,) * channels, std=(0.204,) * channels)


def cifar10(config: DataConfig) -> ImageSet:
    """50,000 + 10,000 photographs of 32 x 32 pixels, or other images in parquet files with these columns."""
    _check_options(config, {})
    (train, validation), classes = load_parquet_splits(config.path, hub_name="uoft-cs/cifar10")
    return ImageSet(train, validation, classes, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


IMAGE_SETS: Mapping[str, Callable[[DataConfig], ImageSet]] = {
    "digits": digits,
    "synthetic": synthetic,
    "cifar10": cifar10,
}


def split(data: TensorData, val_fraction: float) -> tuple[TensorData, TensorData]:
    """Hold out `val_fraction` of each class. The split depends on the data and the fraction only, so that
    runs with different seeds are evaluated on the same samples."""
    labels = data.columns["label"]
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        members = (labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=generator_for("split", label))]
        held_out[shuffled[: round(len(members) * val_fraction)]] = True
    if held_out.all() or not held_out.any():
        raise ConfigError(
            f"data.val_fraction={val_fraction} leaves {int((~held_out).sum())} samples for training and "
            f"{int(held_out.sum())} for validation. Both need at least one: choose a value between 0 and 1."
        )
    return (
        TensorData(data.select((~held_out).nonzero().flatten())),
        TensorData(data.select(held_out.nonzero().flatten())),
    )


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


def _digits_table() -> np.ndarray[Any, np.dtype[np.float64]]:
    """[1797, 65]: 64 pixels and the digit. Read without importing scikit-learn, which takes a second."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise PreflightError(
            "data=digits needs scikit-learn, which is not installed: pip install scikit-learn"
        )
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():  # elsewhere in other versions
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        return np.column_stack([pixels, labels]).astype(np.float64)
    return np.loadtxt(io.BytesIO(gzip.decompress(file.read_bytes())), delimiter=",")


def _bytes_below_128(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 128, shape, dtype=torch.uint8, generator=generator)


def _refuse_path(config: DataConfig, reason: str) -> None:
    if config.path is not None:
        raise ConfigError(
            f"data.path={config.path} is set, but data={config.name} {reason} and reads no files. "
            f"Remove data.path."
        )


def _check_options(config: DataConfig, defaults: Mapping[str, int]) -> dict[str, int]:
    """The options of a set: `defaults` updated by the config. Raises ConfigError for invalid ones."""
    values = {**defaults, **config.options}
    for name, value in values.items():
        if name not in defaults:
            known = f"It has {', '.join(defaults)}." if defaults else "It has no options."
            raise ConfigError(f"data.{name} is not an option of data={config.name}. {known}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"data.{name}={value!r} must be a whole number of at least 1.")
    return values
