"""Images of one size from parquet files as the Hugging Face hub has them, decoded into uint8 tensors.

From a folder with train*.parquet and test*.parquet, beside which nothing is written, so that it may be
read-only and several ranks may read it at once; or by a name of the hub.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from launcher.data.images.hugging_face import LABEL_COLUMNS, image_of, listing_of, load
from launcher.data.images.photograph import as_rgb, read_image
from launcher.data.libraries import datasets_library
from launcher.data.tensor_cache import Stored, cache_folder, cached, size_and_time
from launcher.data.tensors import TensorData
from launcher.errors import DataError, first_line

SPLITS = ("train", "test")
FILES = "train*.parquet and test*.parquet"  # of a folder


def load_parquet_splits(
    folder: Path | None, hub_name: str, name: str, cache: str, columns: tuple[str | None, str | None]
) -> tuple[TensorData, TensorData, tuple[str, ...]]:
    """Train and test with columns image uint8 [n, 3, h, w] and label int64 [n], and the names of the classes.

    From the files of a folder; without one `hub_name` from the hub or its cache. `name` is that of the set.
    cache: where the decoded images of a folder are kept: none, auto or a folder.
    columns: the names of those of images and labels; None: by their types, but for labels first `label`.
    """
    files = {} if folder is None else {split: _split_files(folder, split) for split in SPLITS}
    about = [[str(file.resolve()), *size_and_time(file)] for each in files.values() for file in each]
    stored = cached(
        cache_folder(cache) if files else None,
        {"images and labels of": about, "columns": columns, "decoded by": as_rgb.__name__},
        lambda: _decoded(files, str(folder or hub_name), columns),
    )
    train, test = (TensorData(stored.part(split), name) for split in SPLITS)
    return train, test, tuple(json.loads(stored.texts["classes"]))


def _decoded(
    files: Mapping[str, Sequence[Path]], where: str, columns: tuple[str | None, str | None]
) -> Stored:
    """The images and labels of both splits, and the names of the classes."""
    library = datasets_library("data=cifar10")
    loaded = _in_memory(library, files) if files else load(library, where, where, FILES)
    splits = [loaded[name] for name in SPLITS]
    image, label = columns
    if label is None and LABEL_COLUMNS[0] in splits[0].features:
        label = LABEL_COLUMNS[0]
    listing = listing_of(library, splits, (image, label), where, Path(), numbered=True)
    labels = torch.tensor(listing.labels)
    tensors = {"train/label": labels[: listing.num_train], "test/label": labels[listing.num_train :]}
    for name, rows in zip(SPLITS, listing.rows, strict=True):
        cells = rows.with_format("arrow")[:][listing.image_column]
        tensors[f"{name}/image"] = _one_size(cells, f"{where} ({name})", listing.image_column)
    in_train, in_test = (_size(tensors[f"{name}/image"]) for name in SPLITS)
    if in_train != in_test:
        raise DataError(f"{where}: images are {in_train} in train, {in_test} in test.")
    return Stored(tensors, {"classes": json.dumps(listing.classes)})


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


def _one_size(cells: Collection[Any], where: str, column: str) -> Tensor:
    """Images, of which there is at least one, as one tensor: uint8 [n, 3, h, w]."""
    for row, cell in enumerate(cells):
        # No other file is read: what is decoded is kept by the size and time of the parquet files alone.
        source, name = image_of(cell.as_py(), f"{where}, row {row}", column, base=None)
        pixels = torch.from_numpy(read_image(source, name, as_rgb))
        if row == 0:
            images = torch.empty(len(cells), *pixels.shape, dtype=torch.uint8)
        if pixels.shape != images.shape[1:]:
            raise DataError(
                f"{where}: row {row} is {_size(pixels)} pixels, row 0 {_size(images)}. All images must have "
                "the same size: resize them first."
            )
        images[row] = pixels
    return images


def _size(images: Tensor) -> str:
    return f"{images.shape[-1]} x {images.shape[-2]}"
