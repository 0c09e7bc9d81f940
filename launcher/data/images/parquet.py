"""Labelled images from parquet files or the Hugging Face hub, decoded into uint8 tensors.

Owns the reading of columns `img` (or `image`) and `label` through the `datasets` library, and the errors for
invalid files. Streams the files and writes nothing beside them, so that read-only folders and several ranks
at once need no cache. Only downloads from the hub are cached, by `datasets`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from launcher.config.messages import install_line
from launcher.data.hub import reachable
from launcher.data.labels import OF_UNLABELLED, UNLABELLED
from launcher.data.tensor_cache import Stored, cache_folder, cached
from launcher.data.tensors import TensorData
from launcher.errors import ConfigError, DataError, PreflightError, first_line

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMN = "label"
SPLITS = ("train", "test")
ROWS_PER_READ = 4096

Splits = tuple[TensorData, TensorData]
UInt8Array = np.ndarray[Any, np.dtype[np.uint8]]
Int64Array = np.ndarray[Any, np.dtype[np.int64]]


def load_parquet_splits(
    path: str | None, hub_name: str, cache: str = "none"
) -> tuple[Splits, tuple[str, ...]]:
    """(train, test) with columns image uint8 [n, 3, h, w] and label int64 [n], and the names of the classes.

    path: a folder with train*.parquet and test*.parquet; None: `hub_name` from the hub or its cache.
    cache: where the decoded images of a folder are kept: none, auto or a folder.
    """
    if path is None:
        return _decoded_splits(path, hub_name)
    files = [file for name in SPLITS for file in _split_files(Path(path).expanduser(), name)]

    def make() -> Stored:
        splits, classes = _decoded_splits(path, hub_name)
        tensors = {
            f"{name}/{column}": values
            for name, data in zip(SPLITS, splits, strict=True)
            for column, values in data.columns.items()
        }
        return Stored(tensors, {"classes": json.dumps(classes)})

    about = [(file, file.stat()) for file in files]
    times = [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file, stat in about]
    stored = cached(cache_folder(cache), {"images of": times}, make)
    train, test = (
        TensorData({column: stored.tensors[f"{name}/{column}"] for column in ("image", "label")})
        for name in SPLITS
    )
    return (train, test), tuple(json.loads(stored.texts["classes"]))


def _decoded_splits(path: str | None, hub_name: str) -> tuple[Splits, tuple[str, ...]]:
    datasets = datasets_library("data=cifar10")
    with _from_hub(datasets, hub_name) if path is None else _from_folder(datasets, path) as dataset:
        parts = [_read_split(dataset[name], f"{path or hub_name} ({name})") for name in SPLITS]
        classes = _class_names(dataset["train"], [labels for _, labels in parts])
    for name, (images, labels) in zip(SPLITS, parts, strict=True):
        _check_labels(labels, len(classes), f"{path or hub_name} ({name})")
        if images.shape[1:] != parts[0][0].shape[1:]:
            raise DataError(
                f"{path or hub_name}: images are {_size(parts[0][0])} in train, {_size(images)} in {name}."
            )
    train, test = (_tensors(images, labels) for images, labels in parts)
    return (train, test), classes


def datasets_library(user: str) -> ModuleType:
    """The `datasets` library, silenced. Raises PreflightError, naming its user, where it is missing."""
    try:
        import datasets
    except ImportError as error:
        raise PreflightError(
            f"{user} needs the `datasets` package, which is not installed: {install_line('datasets')}"
        ) from error
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # failures are raised instead
    datasets.disable_progress_bars()
    module: ModuleType = datasets
    return module


@contextlib.contextmanager
def _from_folder(datasets: ModuleType, path: str) -> Iterator[Any]:
    folder = Path(path).expanduser()
    files = {name: [str(file) for file in _split_files(folder, name)] for name in SPLITS}
    # A private cache folder: streaming stores no data in it, but needs a writable lock file.
    with tempfile.TemporaryDirectory() as cache:
        how = {"streaming": True, "cache_dir": cache, "batch_size": ROWS_PER_READ}
        with _reading(str(folder)):
            dataset = datasets.load_dataset("parquet", data_files=files, **how)
        yield dataset


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # pyarrow's errors are one of these
        raise DataError(f"{where}: a parquet file cannot be read: {first_line(error)}") from error


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


@contextlib.contextmanager
def _from_hub(datasets: ModuleType, hub_name: str) -> Iterator[Any]:
    try:
        with offline_if_unreachable(datasets):
            yield datasets.load_dataset(hub_name)
    except (OSError, ValueError) as error:  # no network, no such set, a damaged cache
        raise DataError(
            f"{hub_name} is not in the cache and cannot be downloaded from the hub: {first_line(error)}. "
            f"Give data.path=<folder with train*.parquet and test*.parquet> or connect to the network once."
        ) from error


@contextlib.contextmanager
def offline_if_unreachable(datasets: ModuleType) -> Iterator[None]:
    """Without a network the hub's client retries for 24 s; in offline mode it uses its cache."""
    import huggingface_hub

    switches: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    if not reachable(huggingface_hub.constants.ENDPOINT):
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def _read_split(rows: Any, where: str) -> tuple[UInt8Array, Int64Array]:
    """images uint8 [n, h, w, 3], labels int64 [n] of one split."""
    image_column = _image_column(rows.column_names, where)
    images: list[UInt8Array] = []
    labels: list[Int64Array] = []
    first_row = 0
    for table in _tables(rows, where):
        images.append(_decode_column(table.column(image_column).to_pylist(), first_row, where))
        labels.append(_label_values(table.column(LABEL_COLUMN), where))
        if images[-1].shape[1:] != images[0].shape[1:]:
            raise DataError(
                f"{where}: row {first_row} is {_size(images[-1])} pixels, row 0 {_size(images[0])}."
            )
        first_row += len(table)
    if not images:
        raise DataError(f"{where} has no rows.")
    return np.concatenate(images), np.concatenate(labels)


def _tables(rows: Any, where: str) -> Iterator[Any]:
    with _reading(where):
        yield from rows.with_format("arrow").iter(batch_size=ROWS_PER_READ)


def _image_column(columns: list[str], where: str) -> str:
    image_column = next((name for name in IMAGE_COLUMNS if name in columns), None)
    if image_column is None or LABEL_COLUMN not in columns:
        raise DataError(
            f"{where} has columns {', '.join(columns)}. Required: {' or '.join(IMAGE_COLUMNS)} "
            f"(encoded images) and {LABEL_COLUMN} (class numbers)."
        )
    return image_column


def _decode_column(cells: list[Any], first_row: int, where: str) -> UInt8Array:
    """uint8 [n, h, w, 3] from cells of {bytes, path} or bytes."""
    decoded: UInt8Array | None = None
    for index, cell in enumerate(cells):
        pixels = _decode(cell, f"{where}, row {first_row + index}")
        if decoded is None:
            decoded = np.empty((len(cells), *pixels.shape), dtype=np.uint8)
        if pixels.shape != decoded.shape[1:]:
            raise DataError(
                f"{where}: row {first_row + index} is {pixels.shape[1]} x {pixels.shape[0]} pixels, row "
                f"{first_row} {_size(decoded)}. All images must have the same size: resize them first."
            )
        decoded[index] = pixels
    assert decoded is not None, "the reader returns no empty tables"
    return decoded


def _decode(cell: Any, where: str) -> UInt8Array:
    from PIL import Image

    encoded = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(encoded, bytes):
        raise DataError(f"{where} is not an image: its bytes are {type(encoded).__name__}.")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:  # SyntaxError: broken PNG
        raise DataError(f"{where} is an image that cannot be decoded: {first_line(error)}") from error


def _label_values(column: Any, where: str) -> Int64Array:
    if column.null_count or not str(column.type).startswith(("int", "uint")):
        raise DataError(
            f"{where}: column {LABEL_COLUMN} has type {column.type} and {column.null_count} empty rows. "
            f"Every row must hold a class number (an integer)."
        )
    values: Int64Array = column.to_numpy().astype(np.int64)
    return values


def _class_names(rows: Any, labels: list[Int64Array]) -> tuple[str, ...]:
    """Class names from the schema's metadata; numbers where it has none."""
    names = getattr(rows.features[LABEL_COLUMN], "names", None)
    return tuple(names) if names else tuple(map(str, range(max(int(part.max()) for part in labels) + 1)))


def _check_labels(labels: Int64Array, num_classes: int, where: str) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise DataError(
            f"{where}: {len(wrong)} labels are outside 0..{num_classes - 1}, the first in row {wrong[0]}: "
            f"{labels[wrong[0]]}.{f' {OF_UNLABELLED}' if labels[wrong[0]] == UNLABELLED else ''}"
        )


def _tensors(images: UInt8Array, labels: Int64Array) -> TensorData:
    channels_first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return TensorData({"image": torch.from_numpy(channels_first), "label": torch.from_numpy(labels)})


def _size(images: UInt8Array) -> str:
    return f"{images.shape[2]} x {images.shape[1]}"
