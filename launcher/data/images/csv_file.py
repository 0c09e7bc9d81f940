"""Photographs listed in a CSV file: one row per image, with its path and its class.

Owns which columns are meant: by the names that the config gives, by the usual ones, or the only two. Paths
are relative to data.path, or else to the folder of the file.
"""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Sequence
from pathlib import Path

from launcher.config.messages import nearest, suggestion
from launcher.data.images.listing import (
    SHOWN,
    SPLIT,
    SUFFIXES,
    TRAIN,
    VALIDATION,
    File,
    FolderListing,
    listing_of,
)
from launcher.errors import ConfigError, DataError, listed

IMAGES = ("images", "image", "path", "file", "filename", "image_id")  # usual names of columns, in any case
LABELS = ("label", "labels", "class", "target")
SEPARATORS = ",;\t|"

Row = dict[str, str]


def list_csv(
    file: Path,
    root: Path | None,
    val_fraction: float,
    image_column: str | None = None,
    label_column: str | None = None,
) -> FolderListing:
    """The images of a CSV; without a column split, `val_fraction` of each class is held out."""
    where = f"data.csv={file}"
    if not file.is_file():
        kind = "is a folder" if file.exists() else "does not exist"
        raise ConfigError(f"{where} {kind}. Give a file with the paths of images and their labels.")
    root = root or file.parent
    columns, rows = _rows(file, where)
    image, label = _chosen(where, columns, image_column, label_column)
    split = next((name for name in columns if name.lower() == SPLIT), None)
    files: list[File] = []
    missing: list[str] = []
    for line, row in rows:
        place = f"{where}, line {line}"
        if not row[image] or not row[label]:
            raise DataError(f"{place}: {image} and {label} must not be empty.")
        held_out = None if split is None else _is_held_out(row[split], place)
        name, found = _found(root, row[image])
        if found is None:
            missing.append(name)
        else:
            files.append(File(name, row[label], held_out, found.st_size, found.st_mtime_ns))
    if missing:
        raise DataError(
            f"{where} names {len(missing)} file(s) that cannot be found in {root}: {listed(missing, SHOWN)}. "
            "Paths are relative to data.path, or else to the CSV's folder; a path without a suffix is tried "
            "with those of images."
        )
    return listing_of(root, files, val_fraction, where)


def _rows(file: Path, where: str) -> tuple[list[str], list[tuple[int, Row]]]:
    """The names of the columns, and each row with its line. Raises DataError, naming the line."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            header = opened.readline()
            opened.seek(0)
            separator = max(SEPARATORS, key=header.count)
            reader = csv.DictReader(opened, strict=True, delimiter=separator, skipinitialspace=True)
            rows = []
            for row in reader:
                if None in row or None in row.values():
                    names = ", ".join(reader.fieldnames or ())
                    raise DataError(
                        f"{where}, line {reader.line_num}: it has more or fewer cells than the first line "
                        f"({names}). A cell with {separator!r} in it stands in quotes."
                    )
                rows.append((reader.line_num, {name: cell.strip() for name, cell in row.items()}))
            return list(reader.fieldnames or ()), rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where} cannot be read as CSV in UTF-8: {error}") from error


def _chosen(where: str, columns: Sequence[str], image: str | None, label: str | None) -> tuple[str, str]:
    """The columns of paths and of labels."""
    for key, name in (("image_column", image), ("label_column", label)):
        if name is not None and name not in columns:
            close = suggestion(nearest(name, columns))
            raise ConfigError(
                f"data.{key}={name}: {where} has no such column.{close} It has {_all(columns)}."
            )
    image = image or _usual(columns, IMAGES)
    label = label or _usual(columns, LABELS)
    rest = [name for name in columns if name.lower() != SPLIT and name not in (image, label)]
    if len(columns) - (SPLIT in map(str.lower, columns)) == 2:  # what no name tells, the other one does
        image = image or rest.pop(0)
        label = label or rest.pop(0)
    if image is None or label is None or image == label:
        raise DataError(
            f"{where} has the columns {_all(columns)}. Which has the paths of the images, which the labels? "
            "Give data.image_column=NAME data.label_column=NAME, or name them images and label. A column "
            "split (train or val) is optional."
        )
    return image, label


def _usual(columns: Sequence[str], names: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(columns)}
    return next((lower[name] for name in names if name in lower), None)


def _all(columns: Sequence[str]) -> str:
    return listed(list(columns), 4 * SHOWN) or "none"


def _found(root: Path, name: str) -> tuple[str, os.stat_result | None]:
    """The name of a file as the system has it; None: there is no such file."""
    has_suffix = os.path.splitext(name)[1].lower() in SUFFIXES
    for suffix in ("",) if has_suffix else ("", *sorted(SUFFIXES)):  # of a column image_id, say
        with contextlib.suppress(OSError):
            return name + suffix, (root / (name + suffix)).stat()
    return name, None


def _is_held_out(word: str, where: str) -> bool:
    if (known := word.lower()) in (*TRAIN, *VALIDATION):
        return known in VALIDATION
    raise DataError(f"{where}: split={word!r} is not one of {', '.join((*TRAIN, *VALIDATION))}.")
