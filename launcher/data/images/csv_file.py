"""Photographs listed in a CSV or another table: one row per image, with its path and its class.

Owns which columns are meant: by the names that the config gives, by the usual ones, or the only two. Paths
are relative to data.path, or else to the folder of the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from launcher.data.images.image_index import SHOWN, SUFFIXES, File, ImageIndex, index_of_files
from launcher.data.part_files import TRAIN, VALIDATION
from launcher.data.tables import read_table
from launcher.errors import DataError, listed

IMAGES = ("images", "image", "path", "file", "filename", "image_id")  # usual names of columns, in any case
LABELS = ("label", "labels", "class", "target")
SPLIT = "split"


def list_csv(
    file: Path,
    root: Path | None,
    val_fraction: float,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageIndex:
    """The images of a CSV; without a column split, `val_fraction` of each class is held out."""
    where = f"data.csv={file}"
    root = root or file.parent
    table = read_table(file)
    columns = list(table.columns)
    image, label = _chosen(where, columns, image_column, label_column)
    split = next((name for name in columns if name.lower() == SPLIT), None)
    cells = [[cell.strip() for cell in table.texts(name)] for name in (image, label, split) if name]
    files: list[File] = []
    missing: list[str] = []
    for row, (path, kind, *part) in enumerate(zip(*cells, strict=True)):
        if not path or not kind:
            raise DataError(f"{table.place(row)}: {image} and {label} must not be empty.")
        name, found = _found(root, path)
        if found is None:
            missing.append(name)
        else:
            held_out = _is_held_out(part[0], table.place(row)) if part else None
            files.append(File(name, kind, held_out, found.st_size, found.st_mtime_ns))
    if missing:
        raise DataError(
            f"{where} names {len(missing)} file(s) that cannot be found in {root}: {listed(missing, SHOWN)}. "
            "Paths are relative to data.path, or else to the CSV's folder; a path without a suffix is tried "
            "with those of images."
        )
    return index_of_files(root, files, val_fraction, where)


def _chosen(where: str, columns: Sequence[str], image: str | None, label: str | None) -> tuple[str, str]:
    """The columns of paths and of labels."""
    image = image or _usual(columns, IMAGES)
    label = label or _usual(columns, LABELS)
    others = [name for name in columns if name.lower() != SPLIT]
    if len(others) == 2:  # what no name tells, the other one does
        rest = [name for name in others if name not in (image, label)]
        image = image or rest.pop(0)
        label = label or rest.pop(0)
    if image is None or label is None or image == label or not {image, label} <= {*columns}:
        raise DataError(
            f"{where} has the columns {listed(columns, 20)}. Which has the paths of the images, which the "
            "labels? Give data.image_column=NAME data.label_column=NAME, or name them images and label. A "
            "column split (train or val) is optional."
        )
    return image, label


def _usual(columns: Sequence[str], names: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(columns)}
    return next((lower[name] for name in names if name in lower), None)


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
