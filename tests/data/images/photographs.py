"""Small photographs on the disk, in the forms in which people have them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from launcher.config.schema import AugmentConfig, DataConfig

ANTS_BEES = Path(__file__).resolve().parents[4] / "shared" / "data" / "ants_bees"
QUARTERS = [[(250, 0, 0), (0, 250, 0)], [(0, 0, 250), (250, 250, 250)]]  # colours of the four corners
ORIENTATION = 0x0112


def data_config(name="imagefolder", path=None, val_fraction=0.25, flip=True, **options):
    return DataConfig(
        name=name,
        path=None if path is None else str(path),
        batch_size=8,
        micro_batch_size=None,
        val_fraction=val_fraction,
        num_workers=0,
        share="equal",
        max_bad_samples=0,
        drop_last=False,
        augment=AugmentConfig(random_crop_padding=0, random_horizontal_flip=flip),
        options={"cache": "none", "image_size": 16, **options},
    )


def corners(width=64, height=48):
    """An image whose four quarters have the colours of QUARTERS."""
    pixels = np.zeros((height, width, 3), np.uint8)
    for row, colours in enumerate(QUARTERS):
        for column, colour in enumerate(colours):
            rows = slice(row * height // 2, height if row else height // 2)
            columns = slice(column * width // 2, width if column else width // 2)
            pixels[rows, columns] = colour
    return Image.fromarray(pixels)


def encoded(image, kind="PNG", **how):
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def corner_colours(pixels):
    """The colours near the four corners of uint8 [3, h, w], to the nearest 50 of 0, 50, .., 250."""
    _, height, width = pixels.shape
    rows, columns = (height // 5, -height // 5 - 1), (width // 5, -width // 5 - 1)
    near = [[np.asarray(pixels)[:, row, column].astype(int) for column in columns] for row in rows]
    return [[tuple(((colour + 25) // 50 * 50).tolist()) for colour in line] for line in near]


def write_classes(folder: Path, classes=("cat", "dog"), count=4, kind="PNG"):
    """`count` images in a folder per class, each of another grey."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            grey = 20 + 20 * index + 100 * number
            Image.new("RGB", (20 + index, 30), (grey,) * 3).save(folder / name / f"{index}.{kind.lower()}")
    return folder
