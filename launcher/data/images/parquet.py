"""Labelled images from parquet files or the Hugging Face hub, decoded into uint8 tensors.

Owns the reading of columns `img` (or `image`) and `label`, and the errors for invalid files. Reads the files
of a folder with `pyarrow` and writes nothing beside them, so that read-only folders and several ranks at once
need no cache. Only downloads from the hub are cached, by `datasets`, which also reads the names of classes.
"""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from launcher.data.images.photograph import DAMAGED
from launcher.data.labels import OF_UNLABELLED, UNLABELLED
from launcher.data.libraries import datasets_library, offline_if_unreachable
from launcher.data.tensor_cache import Stored, cache_folder, cached, size_and_time
from launcher.data.tensors import TensorData
from launcher.errors import ConfigError, DataError, first_line

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMN = "label"
SPLITS = ("train", "test")

Splits = tuple[TensorData, TensorData]


def load_parquet_splits(
    path: str | None, hub_name: str, cache: str = "none"
) -> tuple[Splits, tuple[str, ...]]:
    """(train, test) with columns image uint8 [n, 3, h, w] and label int64 [n], and the names of the classes.

    path: a folder with train*.parquet and test*.parquet; None: `hub_name` from the hub or its cache.
    cache: where the decoded images of a folder are kept: none, auto or a folder.
    """
    make = partial(_decoded, path, hub_name)
    if path is None:
        stored = make()
    else:
        files = [file for name in SPLITS for file in _split_files(Path(path).expanduser(), name)]
        about = [[str(file.resolve()), *size_and_time(file)] for file in files]
        stored = cached(cache_folder(cache), {"images of": about}, make)
    train, test = (TensorData(stored.part(name)) for name in SPLITS)
    return (train, test), tuple(json.loads(stored.texts["classes"]))


def _decoded(path: str | None, hub_name: str) -> Stored:
    """The images and labels of both splits, and the names of the classes."""
    library = datasets_library("data=cifar10")
    tables = _from_hub(library, hub_name) if path is None else _from_folder(Path(path).expanduser())
    where = {name: f"{path or hub_name} ({name})" for name in SPLITS}
    parts = {name: _read_split(tables[name], where[name]) for name in SPLITS}
    in_train, in_test = (_size(part["image"]) for part in parts.values())
    if in_train != in_test:
        raise DataError(f"{path or hub_name}: images are {in_train} in train, {in_test} in test.")
    names = getattr(library.Features.from_arrow_schema(tables["train"].schema)[LABEL_COLUMN], "names", None)
    highest = max(int(part["label"].max()) for part in parts.values())
    classes = list(names or map(str, range(highest + 1)))
    for name, part in parts.items():
        _check_labels(part["label"], len(classes), where[name])
    tensors = {f"{name}/{column}": part[column] for name, part in parts.items() for column in part}
    return Stored(tensors, {"classes": json.dumps(classes)})


def _from_folder(folder: Path) -> dict[str, Any]:
    """The `pyarrow.Table` of each split."""
    from pyarrow import parquet

    files = {name: _split_files(folder, name) for name in SPLITS}
    try:
        return {name: parquet.read_table(paths) for name, paths in files.items()}
    except (OSError, ValueError) as error:  # pyarrow's errors are one of these
        raise DataError(f"{folder}: a parquet file cannot be read: {first_line(error)}") from error


def _split_files(folder: Path, name: str) -> list[Path]:
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(
            f"data.path={folder} {kind}. Give the folder with train*.parquet and test*.parquet."
        )
    files = sorted(folder.glob(f"{name}*.parquet"))
    if not files:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
        raise DataError(f"data.path={folder} has no {name}*.parquet. It has: {found}.")
    return files


def _from_hub(datasets: ModuleType, hub_name: str) -> dict[str, Any]:
    """The `pyarrow.Table` of each split, which `datasets` has downloaded."""
    try:
        with offline_if_unreachable(datasets):
            loaded = datasets.load_dataset(hub_name)
    except (OSError, ValueError) as error:  # no network, no such set, a damaged cache
        raise DataError(
            f"{hub_name} is not in the cache and cannot be downloaded from the hub: {first_line(error)}. "
            f"Give data.path=<folder with train*.parquet and test*.parquet> or connect to the network once."
        ) from error
    return {name: loaded[name].data.table for name in SPLITS}


def _read_split(table: Any, where: str) -> dict[str, Tensor]:
    """The columns image, uint8 [n, 3, h, w], and label, int64 [n], of one split."""
    image_column = next((name for name in IMAGE_COLUMNS if name in table.column_names), None)
    if image_column is None or LABEL_COLUMN not in table.column_names:
        raise DataError(
            f"{where} has columns {', '.join(table.column_names)}. Required: {' or '.join(IMAGE_COLUMNS)} "
            f"(encoded images) and {LABEL_COLUMN} (class numbers)."
        )
    if not len(table):
        raise DataError(f"{where} has no rows.")
    for row, cell in enumerate(table.column(image_column)):
        pixels = _decode(cell.as_py(), f"{where}, row {row}")
        if row == 0:
            images = torch.empty(len(table), *pixels.shape, dtype=torch.uint8)
        if pixels.shape != images.shape[1:]:
            raise DataError(
                f"{where}: row {row} is {_size(pixels)} pixels, row 0 {_size(images)}. All images must have "
                "the same size: resize them first."
            )
        images[row] = pixels
    return {"image": images, "label": _labels(table.column(LABEL_COLUMN), where)}


def _decode(cell: Any, where: str) -> Tensor:
    """The pixels of a cell of {bytes, path} or bytes: uint8 [3, h, w]."""
    encoded = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(encoded, bytes):
        raise DataError(f"{where} is not an image: its bytes are {type(encoded).__name__}.")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except DAMAGED as error:
        raise DataError(f"{where} is an image that cannot be decoded: {first_line(error)}") from error


def _labels(column: Any, where: str) -> Tensor:
    if column.null_count or not str(column.type).startswith(("int", "uint")):
        raise DataError(
            f"{where}: column {LABEL_COLUMN} has type {column.type} and {column.null_count} empty rows. "
            f"Every row must hold a class number (an integer)."
        )
    return torch.from_numpy(column.to_numpy().astype(np.int64))


def _check_labels(labels: Tensor, num_classes: int, where: str) -> None:
    wrong = ((labels < 0) | (labels >= num_classes)).nonzero().flatten().tolist()
    if wrong:
        first = int(labels[wrong[0]])
        raise DataError(
            f"{where}: {len(wrong)} labels are outside 0..{num_classes - 1}, the first in row {wrong[0]}: "
            f"{first}.{f' {OF_UNLABELLED}' if first == UNLABELLED else ''}"
        )


def _size(images: Tensor) -> str:
    return f"{images.shape[-1]} x {images.shape[-2]}"
