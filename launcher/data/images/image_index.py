"""The photographs of a set, wherever they lie: their classes, and which of them are held out.

Owns the split of sets that come without one. Images are opened when they are needed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.data.images.image_file import Source
from launcher.data.split import label_to_index, natural, numbered, refuse_one_class, stratified_split
from launcher.errors import DataError

KINDS = ("bmp", "gif", "jfif", "jpe", "jpeg", "jpg", "pgm", "png", "ppm", "tga", "tif", "tiff", "webp")
SUFFIXES = frozenset(f".{kind}" for kind in KINDS)
SHOWN = 5  # names in a message


@dataclass(frozen=True)
class ImageIndex:
    """All photographs of a set by index. Those that are held out come after those for training."""

    rows: tuple[int, ...]  # where each photograph is in what was listed
    labels: tuple[int, ...]  # of each photograph: the index of its class
    classes: tuple[str, ...]
    num_train: int
    source_of: Callable[[int], tuple[Source, str]]  # of a row: the image or its file, and its name for errors
    identities: Sequence[str]  # of each row: what ranks must have in common
    key: str  # digest of what is listed and of its versions, for the cache of decoded images

    def __len__(self) -> int:
        return len(self.rows)

    def source(self, index: int) -> tuple[Source, str]:
        """The image or the file that holds it, and its name. Raises DataError where there is none."""
        return self.source_of(self.rows[index])

    def identity(self, index: int) -> str:
        """What ranks must have in common of a photograph; their paths and times may differ."""
        return self.identities[self.rows[index]]


def image_index(
    labels: Sequence[str],
    held_out: Sequence[bool] | None,
    val_fraction: float,
    where: str,
    classes: Sequence[str] = (),
    **fields: object,
) -> ImageIndex:
    """The index with these `fields`, the last three of an ImageIndex.

    held_out: of a set with a split, whether each row is; None: `val_fraction` of each class is. Without
    `classes` they are those of the training rows, sorted. `where` is the config's key that an error mentions.
    """
    counts = Counter(labels)
    if held_out is None:
        train, validation = stratified_split(numbered(labels), val_fraction, f"images of {where}", DataError)
        # The only image of a class is for training, which would not know the class.
        single = {row for row in validation if counts[labels[row]] == 1}
        train, validation = sorted({*train, *single}), [row for row in validation if row not in single]
    else:
        train = [row for row, out in enumerate(held_out) if not out]
        validation = [row for row, out in enumerate(held_out) if out]
        if not train or (val_fraction and not validation):
            lacking = "validation" if train else "training"
            raise DataError(f"{where} has {len(labels)} images, but none for {lacking}.")
    rows = (*train, *validation)
    classes = classes or sorted({labels[row] for row in train}, key=natural)
    numbers = label_to_index([labels[row] for row in rows], classes, lambda row: where)
    refuse_one_class(classes, where)
    return ImageIndex(rows, tuple(numbers), tuple(classes), len(train), **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class File:
    """An image file and the label that its folder or a CSV gives it. `held_out` is None before a split."""

    path: str  # relative to the folder of the set where it lies in it, with "/"
    label: str  # encodable, because it is shown everywhere
    held_out: bool | None
    size: int  # bytes
    mtime_ns: int


def index_of_files(root: Path, files: Sequence[File], val_fraction: float, where: str) -> ImageIndex:
    """The index of these files, in the order of their paths."""
    files = sorted(files, key=lambda file: file.path)
    if not files:
        raise DataError(f"{where} has no images. Known kinds: {', '.join(sorted(SUFFIXES))}.")
    digest = hashlib.sha256(f"{root}\n".encode(errors="surrogateescape"))
    for file in files:
        digest.update(f"{file.path}\0{file.size}\0{file.mtime_ns}\n".encode(errors="surrogateescape"))

    def source_of(row: int) -> tuple[Source, str]:
        path = root / files[row].path
        return path, str(path)

    return image_index(
        [file.label for file in files],
        None if files[0].held_out is None else [bool(file.held_out) for file in files],
        val_fraction,
        where,
        source_of=source_of,
        identities=[f"{file.path}\0{file.size}" for file in files],
        key=digest.hexdigest(),
    )
