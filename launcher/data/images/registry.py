"""Image sets by name: as uint8 tensors in memory, or as photographs that are decoded when they are read.

Owns the source of each set and the split of sets that come without one. Never communicates: every rank loads
the same set. The modules `folder` and `hugging_face` beside it read the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from launcher.config.messages import unknown_name
from launcher.config.schema import AugmentConfig, DataConfig
from launcher.data.augment import Constants, ImageTransform, Normalise
from launcher.data.batch_plan import generator_for
from launcher.data.images.cache import decoded_images
from launcher.data.images.cifar_batches import batch_files, read_batches
from launcher.data.images.cifar_parquet import load_parquet
from launcher.data.images.csv_file import list_csv
from launcher.data.images.folder import list_folder
from launcher.data.images.hugging_face import list_rows
from launcher.data.images.image_dataset import ImageDataset, ImageOptions
from launcher.data.images.image_index import ImageIndex
from launcher.data.options import Cache, Count, NoOptions, Text, options_of, refuse_path
from launcher.data.split import stratified_split
from launcher.data.tensor_cache import cache_folder
from launcher.data.tensors import Batch, TensorData
from launcher.errors import ConfigError

# The arrays of load_digits of scikit-learn: the test set of "Optical Recognition of Handwritten Digits" by
# E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository (doi.org/10.24432/C50P49, CC BY 4.0).
DIGITS = Path(__file__).with_name("digits.npz")
DIGITS_MAXIMUM = 16  # the set counts dark pixels of 4 x 4 blocks
CIFAR_FILES = "data_batch_1 to 5 and test_batch, the same as .bin, or parquet files of train and test"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's photographs, as torchvision has them


@dataclass(frozen=True)
class SyntheticOptions:
    """The sizes of data=synthetic."""

    num_samples: Count = 2048
    num_classes: Count = 10
    channels: Count = 3
    image_size: Count = 32


@dataclass(frozen=True)
class CifarOptions:
    """The keys of data=cifar10."""

    cache: Cache = "auto"


@dataclass(frozen=True)
class HubOptions(ImageOptions):
    """The keys of data=hf, which data=imagefolder has too."""

    image_column: Text | None = None
    label_column: Text | None = None


@dataclass(frozen=True)
class FolderOptions(HubOptions):
    """The keys of data=imagefolder beside those of data=hf."""

    csv: Text | None = None
    train: Text | None = None
    validation: Text | None = None


@dataclass(frozen=True)
class ImageSet:
    """Columns "image" (uint8 [n, c, h, w]) and "label" (int64 [n]), split for training and validation.

    Either both sets are in memory or both are photographs that loader processes decode.
    """

    train: TensorData | ImageDataset
    validation: TensorData | ImageDataset
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
        if isinstance(self.train, ImageDataset):
            return self.train.shape
        return tuple(self.train.columns["image"].shape[1:])

    def train_transform(self, augment: AugmentConfig) -> Callable[[Batch], Batch]:
        """batch -> the same with randomly cropped, mirrored, normalised fp32 images."""
        normalise = Normalise(self.mean, self.std)
        if isinstance(self.train, ImageDataset):  # cut and mirrored where it is read
            return ImageTransform(normalise)
        return ImageTransform(
            normalise, padding=augment.random_crop_padding, flip=augment.random_horizontal_flip
        )

    def eval_transform(self) -> Callable[[Batch], Batch]:
        """batch -> the same with normalised fp32 images."""
        return ImageTransform(Normalise(self.mean, self.std))


def load_images(config: DataConfig) -> ImageSet:
    """Load the set `config.name`. Raises ConfigError for a wrong config, DataError for unusable data."""
    name = str(config.name)
    if name not in IMAGE_SETS:
        raise ConfigError(unknown_name(f"data.name={name} as a set of images", name, list(IMAGE_SETS)))
    return IMAGE_SETS[name](config)


def digits(config: DataConfig) -> ImageSet:
    """1,797 handwritten digits of 8 x 8 pixels, one channel, from the file beside this one."""
    refuse_path(config, "comes with the launcher")
    options_of(config, NoOptions)
    with np.load(DIGITS) as arrays:  # images uint8 [1797, 8, 8] in 0..16, labels uint8 [1797]
        pixels = np.rint(arrays["images"] * (255 / DIGITS_MAXIMUM)).astype(np.uint8)
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    images = torch.from_numpy(pixels).view(-1, 1, 8, 8)
    data = TensorData({"image": images, "label": labels}, config.name)
    train, validation = split(data, config.val_fraction)
    return ImageSet(train, validation, tuple("0123456789"), mean=(0.3053,), std=(0.3761,))


def synthetic(config: DataConfig) -> ImageSet:
    """Learnable images of any size: a fixed pattern per class plus noise of equal amplitude."""
    refuse_path(config, "is generated")
    num_samples, num_classes, channels, size = sizes = astuple(options_of(config, SyntheticOptions))
    generator = generator_for("synthetic", *sizes)
    patterns = _bytes_below_128(generator, num_classes, channels, size, size)
    noise = _bytes_below_128(generator, num_samples, channels, size, size)
    labels = torch.arange(num_samples) % num_classes
    data = TensorData({"image": noise.add_(patterns[labels]), "label": labels}, config.name)
    classes = tuple(f"class{index}" for index in range(num_classes))
    train, validation = split(data, config.val_fraction)
    # the sum of two uniform numbers below 1/2: mean 1/2, variance 2 * (1/2)^2 / 12
    return ImageSet(train, validation, classes, mean=(0.5,) * channels, std=(0.204,) * channels)


def cifar10(config: DataConfig) -> ImageSet:
    """50,000 + 10,000 photographs of 32 x 32 pixels, or other images of one size in parquet files."""
    options = options_of(config, CifarOptions)
    folder = None if config.path is None else Path(config.path)
    if folder is not None and (files := batch_files(folder)):
        train, validation, classes = read_batches(files, str(config.name))
    elif folder is not None and not any(folder.glob("*.parquet")):
        raise ConfigError(f"data.path={folder} is not a folder with {CIFAR_FILES}.")
    else:
        train, validation, classes = load_parquet(
            folder, str(config.name), options.cache, config.val_fraction
        )
    return ImageSet(train, validation, classes, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def imagefolder(config: DataConfig) -> ImageSet:
    """Photographs of any size in class folders, or listed in a CSV."""
    options = options_of(config, FolderOptions)
    folder = None if config.path is None else Path(config.path)
    file = None if options.csv is None else Path(options.csv)
    if file is None and folder is not None and folder.suffix.lower() == ".csv":
        file, folder = folder, None
    if file is not None:
        columns = options.image_column, options.label_column
        listing = list_csv(file, folder, config.val_fraction, *columns)
    elif folder is not None:
        listing = list_folder(folder, config.val_fraction, options.train, options.validation)
    else:
        raise ConfigError(
            "data=imagefolder needs data.path=DIR, a folder with one folder per class, or "
            "data.csv=FILE with the paths of images and their labels."
        )
    return photographs(config, listing, options)


def hf(config: DataConfig) -> ImageSet:
    """Photographs of any size through the `datasets` library: a folder, a file, or a name of the hub."""
    options = options_of(config, HubOptions)
    if config.path is None:
        raise ConfigError("data=hf needs data.path=FOLDER, FILE or a name of the Hugging Face hub.")
    listing = list_rows(config.path, options.image_column, options.label_column, config.val_fraction)
    return photographs(config, listing, options)


def photographs(config: DataConfig, index: ImageIndex, options: ImageOptions) -> ImageSet:
    """The set of an index, with one cache for both parts. Raises ConfigError for padding, which none gets."""
    if padding := config.augment.random_crop_padding:
        advice = "Photographs are cut at random by data.crop_scale, the smallest share of their area."
        raise ConfigError(f"data.augment.random_crop_padding={padding}: must be 0. {advice}")
    indices = range(len(index))
    folder = cache_folder(options.cache)
    decoded = None if folder is None else decoded_images(folder, index, options.base_size)
    parts = (indices[: index.num_train], True), (indices[index.num_train :], False)
    train, validation = (
        ImageDataset(
            str(config.name), index, part, options, decoded, training, config.augment.random_horizontal_flip
        )
        for part, training in parts
    )
    return ImageSet(train, validation, index.classes, MEAN, STD)


IMAGE_SETS: Mapping[str, Callable[[DataConfig], ImageSet]] = {
    "digits": digits,
    "synthetic": synthetic,
    "cifar10": cifar10,
    "imagefolder": imagefolder,
    "hf": hf,
}


def split(data: TensorData, val_fraction: float) -> tuple[TensorData, TensorData]:
    """Hold out `val_fraction` of each class; of 0 the second part is empty."""
    train, validation = (
        torch.tensor(part) for part in stratified_split(data.columns["label"], val_fraction, "images")
    )
    return TensorData(data.select(train), data.name), TensorData(data.select(validation.long()), data.name)


def _bytes_below_128(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 128, shape, dtype=torch.uint8, generator=generator)
