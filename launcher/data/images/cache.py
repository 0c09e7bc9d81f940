"""Decoded photographs in one memory-mapped file, built once before training where data.cache asks for it.

Owns the file: the RGB pixels of all images, one after another, then height and width of each as int32. The
shorter side of an image has at most `side` pixels and nothing is cut off, so that crops see what they would
see without the cache. A file is written whole or not at all, and its name is the digest of the listing. The
processes of a machine share it. It is never a reason to end a run: without space there is no cache.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from PIL import Image

from launcher.data.images.image_file import UInt8Array, decode, shrunk
from launcher.data.images.image_index import ImageIndex
from launcher.errors import DataError, DataWarning

DECODED_AT_ONCE = 256  # images that are decoded before they are written
LOGGED_S = 30.0  # between two lines about the progress

log = logging.getLogger("launcher")


def decoded_images(folder: Path, images: ImageIndex, side: int) -> DecodedImages | None:
    """The decoded images, built if the folder does not hold them. None, with a warning, if it cannot."""
    key = f"{images.key}\n{len(images)} {side}"
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.images"
    try:
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock")):
                if not path.is_file():
                    _build(path, images, side)
        return DecodedImages(path, len(images))
    except OSError as error:
        warnings.warn(
            f"no cache of decoded images in {folder}: {error.strerror or error}. Images are decoded in "
            "each epoch. Give another folder with data.cache=DIR, or data.cache=none.",
            DataWarning,
            stacklevel=2,
        )
        return None


class DecodedImages:
    """Images by index, in memory that all processes share."""

    def __init__(self, path: Path, count: int) -> None:
        content: UInt8Array = np.memmap(path, np.uint8, mode="r")
        self._pixels = content[: len(content) - 8 * count]
        self._sizes = content[len(self._pixels) :].view(np.int32).reshape(count, 2)
        self._ends = np.cumsum(3 * self._sizes.prod(axis=1, dtype=np.int64))

    def __getitem__(self, index: int) -> Image.Image | None:
        """The image; None for one that could not be decoded."""
        height, width = map(int, self._sizes[index])
        if not height:
            return None
        end = int(self._ends[index])
        pixels = self._pixels[end - 3 * height * width : end]
        return Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)


def _build(path: Path, images: ImageIndex, side: int) -> None:
    """Write the file. Threads decode, which Pillow does without Python's lock."""
    read = functools.partial(_pixels, images, side=side)
    partial, count = path.with_suffix(".partial"), len(images)
    sizes = np.zeros((count, 2), np.int32)
    logged = time.monotonic()
    try:
        with open(partial, "wb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for first in range(0, count, DECODED_AT_ONCE):
                indices = range(first, min(first + DECODED_AT_ONCE, count))
                for index, pixels in zip(indices, pool.map(read, indices), strict=True):
                    if pixels is not None:
                        sizes[index] = pixels.shape[:2]
                        file.write(pixels.tobytes())
                if time.monotonic() - logged > LOGGED_S:
                    logged = time.monotonic()
                    log.info("decoding into %s: %d of %d images", path, indices.stop, count)
            file.write(sizes.tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _pixels(images: ImageIndex, index: int, side: int) -> NDArray[np.uint8] | None:
    """uint8 [height, width, 3]; None for an image that cannot be read, which is reported where it is used."""
    try:
        return decode(*images.source(index), lambda image: shrunk(image, side))
    except DataError:
        return None
