"""Images and labels from what the Hugging Face `datasets` library reads.

Owns the choice of reader (a folder that was saved, parquet, CSV or JSON files, a folder of images, a name of
the hub), of splits, and of the two columns. Images are decoded when they are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from launcher.config.messages import nearest, suggestion
from launcher.data.images.listing import TRAIN, VALIDATION
from launcher.data.images.photograph import Source
from launcher.data.labels import OF_UNLABELLED, UNLABELLED
from launcher.data.libraries import datasets_library, offline_if_unreachable
from launcher.data.part_files import begins_with_word
from launcher.data.split import class_numbers, parts, refuse_one_class
from launcher.data.tensor_cache import size_and_time
from launcher.errors import ConfigError, DataError, first_line, listed

READERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json"}
SAVED = ("state.json", "dataset_dict.json")  # by save_to_disk
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels", "class", "target")
OF_ANY_SIZE = "parquet, CSV or JSON files or class folders"
SHOWN = 10


@dataclass(frozen=True)
class HubListing:
    """The rows of one or two splits. Those that are held out come after those for training."""

    base: Path  # what paths of images are relative to
    rows: tuple[Any, ...]  # of `datasets`, with cells of images that are not decoded
    places: tuple[tuple[int, int], ...]  # of each photograph: which rows, which row
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    num_train: int
    image_column: str
    where: str

    @cached_property
    def key(self) -> str:
        """Digest of what the library knows the rows by, and of the files that they name."""
        digest = hashlib.sha256(f"{self.base}\n{self.image_column}\n".encode())
        for rows in self.rows:
            digest.update(f"{rows._fingerprint} {len(rows)}\n".encode())
        digest.update(repr(self.places).encode())
        names_files = isinstance(self.source(0)[0], Path)
        for index in range(len(self.places)) if names_files else ():
            source, _ = self.source(index)
            if isinstance(source, Path) and source.exists():
                digest.update(f"{source}\0{size_and_time(source)}\n".encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def identity(self, index: int) -> str:
        """The place of its row."""
        return str(self.places[index])

    def source(self, index: int) -> tuple[Source, str]:
        """The image, or the file that holds it. Raises DataError where the cell is empty."""
        which, row = self.places[index]
        name = f"{self.where}, row {row}{' of the validation split' if which else ''}"
        return image_of(self.rows[which][row][self.image_column], name, self.image_column, self.base)


def image_of(cell: object, name: str, column: str, base: Path | None) -> tuple[Source, str]:
    """The image of a cell, or the file below `base` that it names; None: it may not name one."""
    content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
    if isinstance(content, bytes):
        return content, name
    named = path or content
    if isinstance(named, str) and base is not None:
        return base / named, f"{name} ({base / named})"
    raise DataError(f"{name} has no image in column {column}: {type(content).__name__}.")


def list_rows(
    path: str, image_column: str | None, label_column: str | None, val_fraction: float
) -> HubListing:
    """The images and labels of a folder, a file, or a name of the hub. ConfigError or DataError.

    Columns without a name are found by their types.
    """
    library = datasets_library("data=hf")
    where = f"data.path={path}"
    splits = _splits(load(library, path, where, named=image_column is not None), where)
    file = Path(path)
    base = file if file.is_dir() else file.parent
    return listing_of(library, splits, (image_column, label_column), where, base, val_fraction)


def listing_of(
    library: ModuleType,
    splits: Sequence[Any],
    columns: tuple[str | None, str | None],
    where: str,
    base: Path,
    val_fraction: float = 0.0,
    numbered: bool = False,
) -> HubListing:
    """The rows of one or two splits, with the columns of images and of labels that the config names.

    `numbered`: whole numbers without names are those of classes, counted from 0 in both splits.
    """
    features = splits[0].features
    image = _column(features, "image", columns[0], library.Image, IMAGE_COLUMNS, where)
    label = _column(features, "label", columns[1], library.ClassLabel, LABEL_COLUMNS, where)
    splits = [_undecoded(library, each, image) for each in splits]
    values = [_values(each, label, where) for each in splits]
    classes = _classes(features[label], values, numbered)
    labels = [_numbers(each, classes, features[label], where) for each in values]
    places = [(which, row) for which, each in enumerate(labels) for row in range(len(each))]
    num_train = len(labels[0])
    if len(splits) == 1:
        train, held_out = parts(torch.tensor(labels[0]), val_fraction, f"rows of {where}", DataError)
        num_train, places = len(train), [(0, row) for row in (*train, *held_out)]
    refuse_one_class(classes, where)
    return HubListing(
        base=base,
        rows=tuple(splits),
        places=tuple(places),
        labels=tuple(labels[which][row] for which, row in places),
        classes=tuple(map(str, classes)),
        num_train=num_train,
        image_column=image,
        where=where,
    )


def load(library: ModuleType, path: str, where: str, holds: str = OF_ANY_SIZE, named: bool = False) -> Any:
    """What the library reads: a set, or a mapping of splits.

    `holds`: what a folder in its place has to hold. `named`: the config names the column of images.
    """
    place = Path(path)
    try:
        if any((place / name).is_file() for name in SAVED):
            return library.load_from_disk(path)
        if place.is_file():
            return _read(library, [place], path)
        if place.is_dir():
            tables = [file for file in sorted(place.iterdir()) if file.suffix in READERS]
            # Images beside the tables would make the library choose the images, and ignore the columns.
            if named and tables:
                return _read(library, tables, path)
            return library.load_dataset(path)
        if place.is_absolute():
            raise ConfigError(f"{where} does not exist. Give a folder, a file, or a hub name.")
        with offline_if_unreachable(library):
            return library.load_dataset(path)
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        if place.exists():
            raise DataError(f"{where} cannot be read: {first_line(error)}") from error
        raise DataError(
            f"{where} is nothing here, and a set of this name is neither in the cache of the "
            f"`datasets` library nor could it be fetched from the hub: {first_line(error)}. Connect to the "
            f"network once, or give a folder: data.path=DIR with {holds}."
        ) from error


def _read(library: ModuleType, files: Sequence[Path], path: str) -> object:
    """Tables, of which those are a split whose name begins with that of one."""
    kinds = {READERS.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        raise ConfigError(
            f"data.path={path} has files of several kinds or of an unknown one: "
            f"{listed([file.name for file in files], SHOWN)}. Known: {', '.join(READERS)}."
        )
    named: dict[str, list[str]] = {}
    for file in files:
        split = next((name for name in VALIDATION if begins_with_word(file.name, name)), TRAIN[0])
        named.setdefault(split, []).append(str(file))
    separator = {"sep": "\t"} if files[0].suffix == ".tsv" else {}
    return library.load_dataset(kinds.pop(), data_files=named, **separator)


def _splits(loaded: object, where: str) -> list[object]:
    """The split to train on and the one that is held out, or a single one to be split."""
    if not isinstance(loaded, Mapping):
        return [loaded]
    if len(loaded) == 1:
        return [*loaded.values()]
    found = [next((n for n in names if n in loaded), None) for names in (TRAIN, VALIDATION)]
    if None in found:
        raise DataError(
            f"{where} has the splits {listed(list(loaded), SHOWN)}. It needs train and one of "
            f"{', '.join(VALIDATION)}, or a single one."
        )
    return [loaded[name] for name in found]


def _column(
    features: Mapping[str, object], what: str, wish: str | None, kind: type, usual: Sequence[str], where: str
) -> str:
    """The column that the config names, or the only one of this type; of labels also the first usual name.

    An image is never chosen of several: the other may be its mask.
    """
    kinds = [f"{name} ({getattr(each, 'dtype', type(each).__name__)})" for name, each in features.items()]
    there = listed(kinds, 2 * SHOWN)
    if wish is not None and wish not in features:
        close = suggestion(nearest(wish, features))
        raise ConfigError(f"data.{what}_column={wish}: {where} has no such column.{close} It has {there}.")
    typed = [name for name, each in features.items() if isinstance(each, kind)]
    named = [name for name in usual if name in features]
    if wish is not None:
        found = [wish]
    elif what == "image":
        found = typed or named
    else:
        found = typed if len(typed) == 1 else named[:1] or typed
    if len(found) != 1:
        raise DataError(
            f"{where} has {len(found) or 'no'} columns of {what}s. Its columns: {there}. Choose one with "
            f"data.{what}_column."
        )
    return found[0]


def _undecoded(library: ModuleType, rows: Any, column: str) -> object:
    """The rows with the encoded images of this column, where its type decodes them."""
    if isinstance(rows.features[column], library.Image):
        return rows.cast_column(column, library.Image(decode=False))
    return rows


def _values(rows: Any, column: str, where: str) -> list[object]:
    values: list[object] = rows.select_columns([column]).with_format("arrow")[:][column].to_pylist()
    if not values:
        raise DataError(f"{where} has a split without rows.")
    if wrong := [row for row, value in enumerate(values) if not _is_label(value)]:
        raise DataError(
            f"{where}: row {wrong[0]} has {values[wrong[0]]!r} in the label column {column} ({len(wrong)} "
            "such rows). Labels must be whole numbers or strings that are not empty."
        )
    return values


def _is_label(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.strip() != "")


def _classes(kind: object, values: Sequence[Sequence[Any]], numbered: bool) -> list[object]:
    if names := getattr(kind, "names", None):
        return list(names)
    if numbered and all(isinstance(value, int) for each in values for value in each):
        return list(range(max(map(max, values)) + 1))
    return sorted(set(values[0]), key=lambda value: (isinstance(value, str), value))


def _numbers(values: Sequence[Any], classes: Sequence[object], kind: object, where: str) -> list[int]:
    """The index of each row's class."""
    names = dict(enumerate(getattr(kind, "names", None) or ()))
    if UNLABELLED in values and (names or UNLABELLED not in classes):
        raise DataError(
            f"{where}: {values.count(UNLABELLED):,} of {len(values):,} labels are -1. {OF_UNLABELLED}"
        )
    return class_numbers([names.get(value, value) for value in values], classes, lambda row: where)
