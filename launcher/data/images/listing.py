"""Photographs that are files: their names, labels and split, however they were listed.

Owns the split of sets that come without one, and the CSV that a run keeps of what was chosen. Images are
opened when they are needed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from launcher.data.images.photograph import Source
from launcher.data.split import class_numbers, numbered, refuse_one_class, stratified
from launcher.errors import DataError, DataWarning, listed

KINDS = ("bmp", "gif", "jfif", "jpe", "jpeg", "jpg", "pgm", "png", "ppm", "tga", "tif", "tiff", "webp")
SUFFIXES = frozenset(f".{kind}" for kind in KINDS)
TRAIN = ("train", "training")  # names of folders and words of a CSV, in any case
VALIDATION = ("val", "valid", "validation", "dev", "test", "testing")  # likewise; the first that exists
COLUMNS = ("path", "label")
SPLIT = "split"
SHOWN = 5  # names in a message


@dataclass(frozen=True)
class File:
    """An image and the label that its folder or the CSV gives it. `held_out` is None before a split."""

    path: str  # relative to the folder of the set where it lies in it, with "/"
    label: str  # encodable, because it is shown everywhere
    held_out: bool | None
    size: int  # bytes
    mtime_ns: int


@dataclass(frozen=True)
class FolderListing:
    """The files of a set. Those that are held out come after those for training."""

    root: Path
    files: tuple[File, ...]
    labels: list[int]  # of each file: the index of its class
    classes: tuple[str, ...]  # sorted
    num_train: int

    @cached_property
    def key(self) -> str:
        """Digest of paths, sizes and times, in the order of the paths."""
        digest = hashlib.sha256(f"{self.root}\n".encode(errors="surrogateescape"))
        for file in self.files:
            digest.update(f"{file.path}\0{file.size}\0{file.mtime_ns}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def identity(self, index: int) -> str:
        """Path within the set, and size."""
        return f"{self.files[index].path}\0{self.files[index].size}"

    def source(self, index: int) -> tuple[Source, str]:
        """The file, and its path for messages."""
        path = self.root / self.files[index].path
        return path, str(path)

    def csv_text(self) -> str:
        """The CSV (path, label, split) that `data.csv` reads back as the same set."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow((*COLUMNS, SPLIT))
        table.writerows((file.path, file.label, "val" if file.held_out else TRAIN[0]) for file in self.files)
        return text.getvalue()


def listing_of(root: Path, files: Sequence[File], val_fraction: float, where: str) -> FolderListing:
    """The listing of these files, split and checked. `where` is the config's key that an error mentions."""
    files = sorted(files, key=lambda file: file.path)
    if not files:
        raise DataError(f"{where} has no images. Known kinds: {', '.join(sorted(SUFFIXES))}.")
    if any(file.held_out is None for file in files):
        files = _split(files, val_fraction)
    train = [file for file in files if not file.held_out]
    validation = [file for file in files if file.held_out]
    for part, name in ((train, "training"), (validation, "validation")):
        if not part and not (name == "validation" and not val_fraction):
            raise DataError(f"{where} has {len(files)} images, but none for {name}. Both need at least one.")
    classes = tuple(sorted({file.label for file in train}, key=by_number))
    files = (*train, *validation)
    labels = class_numbers([file.label for file in files], classes, lambda row: where)
    refuse_one_class(classes, where)
    return FolderListing(root, files, labels, classes, len(train))


def _split(files: Sequence[File], val_fraction: float) -> list[File]:
    names = sorted({file.label for file in files})
    labels = numbered([file.label for file in files])
    held_out = stratified(labels, val_fraction)
    counts = torch.bincount(labels)
    held_out &= counts[labels] > 1  # the only image of a class is for training
    bare = [name for number, name in enumerate(names) if not held_out[labels == number].any()]
    if bare and held_out.any():
        warnings.warn(
            f"no image is held out of {len(bare)} class(es), which have too few: {listed(bare, SHOWN)}. The "
            "evaluation says nothing about them.",
            DataWarning,
            stacklevel=2,
        )
    return [replace(file, held_out=out) for file, out in zip(files, held_out.tolist(), strict=True)]


def by_number(label: str) -> tuple[int, str]:
    """Sort key that puts the label 2 before 10, and numbers before words."""
    return (int(label), "") if label.isdecimal() else (2**62, label)
