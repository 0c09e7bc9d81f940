"""CIFAR-10 as the Hugging Face hub has it, and other images of one size: decoded into uint8 tensors.

From a folder with train*.parquet and test*.parquet, beside which nothing is written, so that it may be
read-only and several ranks may read it at once; or by the name of the hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from launcher.data.images.hugging_face import index_of_rows, load
from launcher.data.images.image_file import UInt8Array, as_rgb, read_image
from launcher.data.libraries import datasets_library
from launcher.data.tensor_cache import Stored, cache_folder, cached, size_and_time
from launcher.data.tensors import TensorData
from launcher.errors import DataError, first_line

HUB_NAME = "uoft-cs/cifar10"
SPLITS = ("train", "test")


def load_parquet(
    folder: Path | None, name: str, cache: str
) -> tuple[TensorData, TensorData, tuple[str, ...]]:
    """Train and test with columns image uint8 [n, 3, h, w] and label int64 [n], and the names of the classes.

    From the files of a folder; without one from the hub or its cache. `name` is that of the set.
    cache: where the decoded images of a folder are kept: none, auto or a folder.
    """
    files = {} if folder is None else {split: _split_files(folder, split) for split in SPLITS}
    about = [[str(file.resolve()), *size_and_time(file)] for each in files.values() for file in each]
    stored = cached(
        cache_folder(cache) if files else None,
        {"images and labels of": about, "decoded by": as_rgb.__name__},
        lambda: _decoded(files, str(folder or HUB_NAME)),
    )
    train, test = (TensorData(stored.part(split), name) for split in SPLITS)
    return train, test, tuple(json.loads(stored.texts["classes"]))


def _decoded(files: Mapping[str, Sequence[Path]], where: str) -> Stored:
    """The images and labels of both splits, and the names of the classes."""
    library = datasets_library("data=cifar10")
    holds = "the batches of CIFAR-10, or train*.parquet and test*.parquet"
    loaded = _in_memory(library, files) if files else load(library, where, where, holds)
    index = index_of_rows(library, [loaded[name] for name in SPLITS], (None, None), where)
    images = [read_image(*index.source(number), as_rgb) for number in range(len(index))]
    if odd := [number for number, each in enumerate(images) if each.shape != images[0].shape]:
        raise DataError(
            f"{index.source(odd[0])[1]} is {_size(images[odd[0]])} pixels, the first image "
            f"{_size(images[0])}. All images must have the same size: resize them first."
        )
    columns = {"image": torch.from_numpy(np.stack(images)), "label": torch.tensor(index.labels)}
    parts = zip(SPLITS, (slice(index.num_train), slice(index.num_train, None)), strict=True)
    tensors = {f"{split}/{name}": column[part] for split, part in parts for name, column in columns.items()}
    return Stored(tensors, {"classes": json.dumps(index.classes)})


def _size(pixels: UInt8Array) -> str:
    return f"{pixels.shape[2]} x {pixels.shape[1]}"


def _in_memory(library: ModuleType, files: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Parquet files as rows of `datasets`, without the copy that its own reader would write."""
    parquet = import_module("pyarrow.parquet")
    try:
        tables = {name: library.table.InMemoryTable(parquet.read_table(each)) for name, each in files.items()}
    except (OSError, ValueError) as error:  # pyarrow's errors are one of these
        folder = files["train"][0].parent
        raise DataError(f"{folder}: a parquet file cannot be read: {first_line(error)}") from error
    # With a fingerprint, or the library would make one of all bytes.
    return {name: library.Dataset(table, fingerprint=name) for name, table in tables.items()}


def _split_files(folder: Path, name: str) -> list[Path]:
    files = sorted(folder.glob(f"{name}*.parquet"))
    if not files:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
        raise DataError(
            f"data.path={folder} has no {name}*.parquet, and no batches of CIFAR-10 (data_batch_1 to "
            f"5 and test_batch, or the same as .bin). It has: {found}."
        )
    return files
