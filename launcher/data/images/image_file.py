"""One photograph: opened, turned upright, cut and resized to a square of RGB pixels.

Owns the ways in which image files differ (modes, 16 bits, EXIF orientation, damage) and the regions that are
cut from them. Knows neither folders nor labels.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from launcher.errors import DataError, first_line

UInt8Array = NDArray[np.uint8]
Source = Path | bytes  # a file, or its content

ATTEMPTS = 10  # at a random region, as in torchvision
RATIO = (3 / 4, 4 / 3)  # of width to height
ORIENTATION = 0x0112  # the EXIF tag
LIES_DOWN = range(5, 9)  # orientations that exchange width and height


class Region(NamedTuple):
    """A part of an upright image, in pixels from its upper left corner."""

    left: float
    top: float
    width: float
    height: float


Choice = Callable[[int, int], Region]  # of a region, from the upright width and height


def read_crop(source: Source, name: str, choose: Choice, side: int) -> UInt8Array:
    """The chosen region, resized with antialiased bilinear filtering: RGB, uint8 [3, side, side].

    Raises DataError, naming the image, where it cannot be read.
    """
    return read_image(source, name, lambda image: cut(image, choose, side))


def read_image(source: Source, name: str, change: Callable[[Image.Image], Image.Image]) -> UInt8Array:
    """What `change` makes of the opened image, in RGB: uint8 [3, h, w]. Raises DataError, naming it."""
    return channels_first(decode(source, name, change))


def decode(source: Source, name: str, change: Callable[[Image.Image], Image.Image]) -> UInt8Array:
    """What `change` makes of the opened image, in RGB: uint8 [h, w, 3]. Raises DataError, naming it."""
    try:
        with warnings.catch_warnings():
            # Of odd metadata; beyond twice Pillow's limit of pixels it raises.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                return np.asarray(change(image))
    except Exception as error:  # Pillow's decoders raise nearly any for damaged files
        raise DataError(f"{name} cannot be read as an image: {first_line(error)}") from error


def channels_first(pixels: UInt8Array) -> UInt8Array:
    """uint8 [h, w, 3] -> [3, h, w], contiguous."""
    return pixels.transpose(2, 0, 1).copy()


def cut(image: Image.Image, choose: Choice, side: int) -> Image.Image:
    """The chosen region of an opened image, upright, in RGB, resized to side x side."""
    width, height = upright_size(image)
    region = choose(width, height)
    upright = _upright(image, max(side / region.width, side / region.height))
    across, down = upright.width / width, upright.height / height
    right = min((region.left + region.width) * across, upright.width)
    bottom = min((region.top + region.height) * down, upright.height)
    box = (region.left * across, region.top * down, right, bottom)
    return upright.resize((side, side), Image.Resampling.BILINEAR, box=box)


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """The whole opened image, upright, in RGB, its shorter side at most `side` pixels long."""
    width, height = upright_size(image)
    scale = side / min(width, height)
    if scale >= 1:
        return _upright(image, 1)
    size = round(width * scale), round(height * scale)
    return _upright(image, scale).resize(size, Image.Resampling.BILINEAR)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height as its EXIF orientation shows it."""
    width, height = image.size
    return (height, width) if image.getexif().get(ORIENTATION, 1) in LIES_DOWN else (width, height)


def _upright(image: Image.Image, scale: float) -> Image.Image:
    """The image in RGB, turned as its EXIF orientation says, not below `scale` of its size."""
    # A JPEG is decoded at a half, a quarter or an eighth, if that is still no smaller than what is needed.
    image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
    ImageOps.exif_transpose(image, in_place=True)
    return as_rgb(image)


def as_rgb(image: Image.Image) -> Image.Image:
    """Eight bits per channel. What is transparent gets the colour that lies below it, as in torchvision."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # Pillow would cut 16 bits off at 255
        pixels = np.asarray(image).astype(np.int64)
        low, high = int(pixels.min()), int(pixels.max())
        # Of 32 bits the range is unknown, and 8 bits in them would become black.
        if low < 0 or (image.mode == "I" and 0 < high < 256) or high >= 1 << 16:
            raise ValueError(
                f"its pixels go from {low} to {high}, where black and white are 0 and 65535: scale them to "
                "this range, or convert to 8 bits"
            )
        return Image.fromarray((pixels >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range: convert to 8 or 16 bits")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def center_crop(share: float) -> Choice:
    """The square in the middle whose side is this share of the image's shorter side."""

    def choose(width: int, height: int) -> Region:
        side = min(width, height) * share
        return Region((width - side) / 2, (height - side) / 2, side, side)

    return choose


def random_resized_crop(width: int, height: int, smallest: float) -> Region:
    """A part of at least the share `smallest` of the area, drawn from torch's generator.

    The distribution is that of torchvision's RandomResizedCrop.get_params
    (https://github.com/pytorch/vision/blob/main/torchvision/transforms/transforms.py), after Szegedy et al.,
    2014 (arXiv:1409.4842, section 6). Area and logarithm of the ratio are uniform; a part that does not fit
    is drawn again, at most nine times, and then lies in the centre.
    """
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(ATTEMPTS):
        of_area, of_ratio, of_top, of_left = torch.rand(4).tolist()
        area = width * height * (smallest + (1 - smallest) * of_area)
        ratio = math.exp(low + (high - low) * of_ratio)
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(of_left * (width - across + 1)), int(of_top * (height - down + 1))
            return Region(left, top, across, down)
    across = min(width, max(1, round(height * RATIO[1])))
    down = min(height, max(1, round(width / RATIO[0])))
    return Region((width - across) // 2, (height - down) // 2, across, down)
