"""CIFAR-10 as the Hugging Face hub has it, and other images of one size: decoded into uint8 tensors.

From a folder with parquet files, read by `datasets`, or by the name of the hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from launcher.data.images.hugging_face import list_rows
from launcher.data.images.image_file import as_rgb, read_image
from launcher.data.tensor_cache import Stored, cache_folder, cached, size_and_time
from launcher.data.tensors import TensorData
from launcher.errors import DataError

HUB_NAME = "uoft-cs/cifar10"


def load_parquet(
    folder: Path | None, name: str, cache: str, val_fraction: float
) -> tuple[TensorData, TensorData, tuple[str, ...]]:
    """Train and test with columns image uint8 [n, 3, h, w] and label int64 [n], and the names of the classes.

    From the files of a folder; without one from the hub or its cache. `name` is that of the set.
    cache: where the decoded images of a folder are kept: none, auto or a folder. `val_fraction` is held out
    of a set with a single split.
    """
    files = [] if folder is None else sorted(folder.glob("*.parquet"))
    key = {
        "images and labels of": [[str(file.resolve()), *size_and_time(file)] for file in files],
        "decoded by": as_rgb.__name__,
        "val_fraction": val_fraction,
    }
    stored = cached(cache_folder(cache) if files else None, key, lambda: _decoded(folder, val_fraction))
    train, test = (TensorData(stored.part(split), name) for split in ("train", "test"))
    return train, test, tuple(json.loads(stored.texts["classes"]))


def _decoded(folder: Path | None, val_fraction: float) -> Stored:
    """The images and labels of both splits, and the names of the classes."""
    path = str(folder or HUB_NAME)
    # Of files that are here the library would keep a copy in HF_HOME, which need not be writable.
    with TemporaryDirectory() as scratch:
        index = list_rows(path, None, None, val_fraction, None if folder is None else scratch)
        images = [read_image(*index.source(number), as_rgb) for number in range(len(index))]
    sizes = sorted({f"{image.shape[2]} x {image.shape[1]}" for image in images})
    if len(sizes) > 1:
        raise DataError(
            f"data.path={path} has images of {', '.join(sizes[:5])} pixels. All images must have the same "
            "size: resize them first, or read them with data=hf."
        )
    columns = {"image": torch.from_numpy(np.stack(images)), "label": torch.tensor(index.labels)}
    parts = {"train": slice(index.num_train), "test": slice(index.num_train, None)}
    tensors = {
        f"{split}/{name}": column[part] for split, part in parts.items() for name, column in columns.items()
    }
    return Stored(tensors, {"classes": json.dumps(index.classes)})
