"""Images and labels from what the Hugging Face `datasets` library reads: a folder, a file, a name of the hub.

Owns the choice of splits and of the two columns; which files a folder's splits are made of is the library's.
Images are decoded when they are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from launcher.data.images.image_file import Source
from launcher.data.images.image_index import ImageIndex, image_index
from launcher.data.labels import OF_UNLABELLED, UNLABELLED
from launcher.data.libraries import datasets_library, go_offline_if_unreachable
from launcher.data.part_files import TRAIN, VALIDATION
from launcher.errors import ConfigError, DataError, first_line, listed

READERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}  # of a single file
SAVED = ("state.json", "dataset_dict.json")  # by save_to_disk
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels", "class", "target")
SHOWN = 10


def list_rows(
    path: str,
    image_column: str | None,
    label_column: str | None,
    val_fraction: float,
    cache_dir: str | None = None,
) -> ImageIndex:
    """The images and labels of a folder, a file, or a name of the hub. ConfigError or DataError.

    Columns without a name are found by their types and by the usual names. cache_dir: where the library keeps
    what it has read, instead of HF_HOME; the images are read from there.
    """
    library, where = datasets_library(), f"data.path={path}"
    splits = _splits(load(library, path, where, cache_dir), where)
    place = Path(path)
    folder = place.parent if place.is_file() else place  # of the paths of images in a column
    splits = [each.with_format(None) for each in splits]  # a saved set may give tensors
    features = splits[0].features
    image = _column(features, "image", image_column, library.Image, IMAGE_COLUMNS, where)
    label = _column(features, "label", label_column, library.ClassLabel, LABEL_COLUMNS, where)
    # Encoded, as bytes or the path of a file.
    images = [each.select_columns([image]).cast_column(image, library.Image(decode=False)) for each in splits]
    labels = [_labels(each.select_columns([label])[:][label], features[label], where) for each in splits]
    places = [(which, row) for which, each in enumerate(labels) for row in range(len(each))]

    def source_of(number: int) -> tuple[Source, str]:
        which, row = places[number]
        name = f"{where}, row {row}{' of the validation split' if which else ''}"
        cell = images[which][row][image] or {}
        if isinstance(cell.get("bytes"), bytes):
            return cell["bytes"], name
        if cell.get("path"):
            return folder / cell["path"], f"{name} ({cell['path']})"
        raise DataError(f"{name} has no image in column {image}.")

    about = [image, *((each._fingerprint, len(each)) for each in images)]
    return image_index(
        [name for each in labels for name in each],
        [which == 1 for which, _ in places] if len(splits) > 1 else None,
        val_fraction,
        where,
        getattr(features[label], "names", ()),
        source_of=source_of,
        identities=list(map(str, places)),
        key=hashlib.sha256(repr(about).encode()).hexdigest(),
    )


def load(library: ModuleType, path: str, where: str, cache_dir: str | None = None) -> Any:
    """What the library reads: a set, or a mapping of splits."""
    place = Path(path)
    try:
        if any((place / name).is_file() for name in SAVED):
            return library.load_from_disk(path)
        if place.is_file() and place.suffix in READERS:
            return library.load_dataset(READERS[place.suffix], data_files=path, cache_dir=cache_dir)
        if place.exists():
            return library.load_dataset(path, cache_dir=cache_dir)
        if place.is_absolute():
            raise ConfigError(f"{where} does not exist. Give a folder, a file, or a hub name.")
        go_offline_if_unreachable(library)
        return library.load_dataset(path)
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        if place.exists():
            raise DataError(f"{where} cannot be read: {first_line(error)}") from error
        raise DataError(
            f"{where} is nothing here, and a set of this name is neither in the cache of the "
            f"`datasets` library nor could it be fetched from the hub: {first_line(error)}. Connect to the "
            "network once, or give a folder: data.path=DIR with parquet, CSV or JSON files or class folders."
        ) from error


def _splits(loaded: Any, where: str) -> list[Any]:
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
    features: Mapping[str, object], what: str, asked: str | None, kind: type, usual: Sequence[str], where: str
) -> str:
    """The column that the config names, or the only one of this type; of labels first the usual names.

    An image is never chosen of several: the other may be its mask.
    """
    kinds = [f"{name} ({getattr(each, 'dtype', type(each).__name__)})" for name, each in features.items()]
    there = listed(kinds, 2 * SHOWN)
    if asked is not None:
        if asked not in features:
            raise DataError(f"{where} has not the column data.{what}_column={asked}. Its columns: {there}.")
        return asked
    typed = [name for name, each in features.items() if isinstance(each, kind)]
    named = [name for name in usual if name in features]
    found = typed or named if what == "image" else named[:1] or typed
    if len(found) != 1:
        raise DataError(
            f"{where} has {len(found) or 'no'} columns of {what}s. Its columns: {there}. Choose one with "
            f"data.{what}_column."
        )
    return found[0]


def _labels(values: Sequence[Any], kind: object, where: str) -> list[str]:
    """The name of each row's class."""
    if not values:
        raise DataError(f"{where} has a split without rows.")
    names = getattr(kind, "names", ())
    wrong = [row for row, value in enumerate(values) if not _is_label(value, bool(names))]
    if wrong:
        found = values[wrong[0]]
        rule = "Labels must be whole numbers or strings that are not empty."
        raise DataError(
            f"{where}: row {wrong[0]} has the label {found!r} ({len(wrong):,} of {len(values):,} rows). "
            f"{OF_UNLABELLED if found == UNLABELLED and names else rule}"
        )
    by_number = dict(enumerate(names))
    return [str(by_number.get(value, value)) for value in values]


def _is_label(value: object, has_names: bool) -> bool:
    """Whether a value is one. Of numbers that stand for names -1 is none; of others it is a class."""
    if isinstance(value, int):
        return value != UNLABELLED or not has_names
    return isinstance(value, str) and value.strip() != ""
