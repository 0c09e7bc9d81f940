"""Photographs in class folders or listed in a CSV: which files, which labels, which split.

Owns the listing (`DIR/class/any/depth/file`, or `DIR/train/class/...` and `DIR/val/class/...` under any usual
names, or the CSV's columns path, label and split), the stratified split of sets that come without one, and
the CSV that says what was chosen. Reads names, sizes and times; images are opened when they are needed.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from launcher.data.files import DataTable, MissingColumnsError, read_csv
from launcher.data.images.photograph import Source
from launcher.data.split import class_numbers, numbered, refuse_one_class, stratified
from launcher.errors import ConfigError, DataError, DataWarning, listed
from launcher.run_dir.atomic import encodable

KINDS = ("bmp", "gif", "jfif", "jpe", "jpeg", "jpg", "pgm", "png", "ppm", "tga", "tif", "tiff", "webp")
SUFFIXES = frozenset(f".{kind}" for kind in KINDS)
TRAIN = ("train", "training")  # parts of the names of folders, and words of a CSV, in any case
VALIDATION = ("val", "valid", "validation", "dev", "test", "testing")  # likewise; the first that exists
# seg_train, TRAIN, ...
PART = re.compile(rf"(?:(.*)[^a-z])?({'|'.join((*TRAIN, *VALIDATION))})(?:[^a-z](.*))?")
COLUMNS = ("path", "label")
SPLIT = "split"
SHOWN = 5  # names in a message
ESCAPED = re.compile(r"\\u(dc[89a-f][0-9a-f])")  # by `encodable`: a byte of a file name that is not UTF-8


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
        """The CSV (path, label, split) that `data.csv` reads back as the same set, also once encodable."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow((*COLUMNS, SPLIT))
        table.writerows((file.path, file.label, "val" if file.held_out else TRAIN[0]) for file in self.files)
        return text.getvalue()


def list_folder(
    root: Path, val_fraction: float, train: str | None = None, validation: str | None = None
) -> FolderListing:
    """The images below class folders. Raises ConfigError or DataError for what cannot be trained on.

    `train` and `validation` name the folders of a set that comes with a split, where their names do not.
    """
    if not root.is_dir():
        kind = "is a file" if root.exists() else "does not exist"
        raise ConfigError(f"data.path={root} {kind}. Give the folder that holds one folder per class.")
    ignored: Counter[str] = Counter()
    parts = _named_parts(root, train, validation) or _parts(root)
    files = [file for part, out in parts.items() for file in _labelled(root, part, out, ignored)]
    _report_ignored(root, ignored)
    return listing_of(root, files, val_fraction, f"data.path={root}")


def _named_parts(root: Path, train: str | None, validation: str | None) -> dict[Path, bool | None]:
    """The folders that the config names, and whether they are held out; empty where it names none."""
    if train is None and validation is not None:
        raise ConfigError(f"data.validation={validation} needs data.train, the folder to train on.")
    for key, name in (("train", train), ("validation", validation)):
        if name is not None and not (root / name).is_dir():
            raise ConfigError(f"data.{key}={name}: there is no folder {root / name}.")
    if train is None:
        return {}
    return {root / train: None} if validation is None else {root / train: False, root / validation: True}


def _parts(root: Path) -> dict[Path, bool | None]:
    """The folders of class folders, and whether they are held out; None: to be split."""
    folders = _folders(root)
    roles = {role: folder for folder in folders if (role := _role(folder.name))}
    trained = sorted((rest, name) for name, rest in roles if name in TRAIN and _folders(roles[name, rest]))
    for rest, name in trained:
        if held_out := next((roles[each, rest] for each in VALIDATION if (each, rest) in roles), None):
            return {_unwrapped(roles[name, rest]): False, _unwrapped(held_out): True}
    lone = roles[trained[0][1], ""] if trained and not trained[0][0] else None
    _refuse_parts(root, folders, lone)
    return {root: None}


def _role(folder: str) -> tuple[str, str] | None:
    """The word for a split in a folder's name, and the rest of the name; None without such a word."""
    found = PART.fullmatch(folder.lower())
    return None if found is None else (found[2], f"{found[1] or ''}{found[3] or ''}")


def _unwrapped(folder: Path) -> Path:
    """The folder within, of the same name and alone there, as archives of splits often have it."""
    inner = folder / folder.name
    return inner if [entry.name for entry in _entries(folder)] == [folder.name] and inner.is_dir() else folder


def _refuse_parts(root: Path, folders: Sequence[Path], train: Path | None) -> None:
    """Raise DataError for folders that are more likely the parts of a set than its classes.

    Such as class folders in `train`, the one of this name, which would be read as one class.
    """
    names = [folder.name for folder in folders]
    within = {folder: tuple(each.name for each in _folders(folder)) for folder in folders}
    if train is not None:
        others = [within[folder] for folder in folders if folder != train]
        if not others or set(within[train]) & {name for each in others for name in each}:
            raise DataError(
                f"data.path={root} has class folders in {train.name}/, but no {'/, '.join(VALIDATION)}/ "
                f"beside it. It has: {listed(names, SHOWN)}. Give the held-out images one of these names, or "
                f"hold out a part of the others: data.path={train}."
            )
    if len(folders) > 1 and len(within[folders[0]]) > 1 and len(set(within.values())) == 1:
        raise DataError(
            f"data.path={root}: {listed([f'{name}/' for name in names], SHOWN)} all hold the same folders: "
            f"{listed(within[folders[0]], SHOWN)}. If these are the classes, name the parts: "
            f"data.train={names[0]} data.validation={names[1]}; if the folders of data.path are, give "
            "data.train=."
        )


def list_csv(
    file: Path, root: Path | None, val_fraction: float, columns: tuple[str, str] = COLUMNS
) -> FolderListing:
    """The images in the first of `columns` of a CSV, relative to `root` or to the CSV's own folder."""
    root = root or file.parent
    table = _table(file, columns)
    paths, labels = (table.column(name) for name in columns)
    splits = table.columns.get(SPLIT)
    files: list[File] = []
    missing: list[str] = []
    for row, (path, label) in enumerate(zip(paths, labels, strict=True)):
        if not path or not label:
            raise DataError(f"data.csv={table.place(row)}: {' and '.join(columns)} must not be empty.")
        held_out = None if splits is None else _is_held_out(splits[row], f"data.csv={table.place(row)}")
        name, found = _found(root, path)
        if found is None:
            missing.append(name)
        else:
            files.append(File(name, label, held_out, found.st_size, found.st_mtime_ns))
    if missing:
        raise DataError(
            f"data.csv={file} names {len(missing)} file(s) that cannot be found in {root}: "
            f"{listed(missing, SHOWN)}. Paths are relative to data.path, or else to the CSV's folder; one "
            "without a suffix is tried with those of images."
        )
    return listing_of(root, files, val_fraction, f"data.csv={file}")


def _found(root: Path, name: str) -> tuple[str, os.stat_result | None]:
    """The name of a file as the system has it, which may have bytes that the CSV escapes; None: no file."""
    named = dict.fromkeys((name, ESCAPED.sub(lambda byte: chr(int(byte[1], 16)), name)))
    by_suffix = () if _suffix(name) in SUFFIXES else (f"{name}{suffix}" for suffix in sorted(SUFFIXES))
    for each in (*named, *by_suffix):  # of a column image_id, say
        with contextlib.suppress(OSError):
            return each, (root / each).stat()
    return name, None


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
    classes = tuple(sorted({file.label for file in train}))
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


def _labelled(root: Path, parent: Path, held_out: bool | None, ignored: Counter[str]) -> Iterator[File]:
    """The images of each class folder of `parent`."""
    classes = _folders(parent)
    if not classes:
        raise DataError(
            f"{parent} has no class folders. Put the images of each class into a folder of its name: "
            f"{parent}/cats/1.jpg. It has: {listed(sorted(os.listdir(parent)), SHOWN) or 'nothing'}."
        )
    ignored.update(_suffix(entry.name) for entry in _entries(parent) if entry.is_file())
    for folder in classes:
        files = list(_images(root, folder, held_out, ignored))
        if not files:
            raise DataError(
                f"the class folder {folder} has no images. Remove it, or put some in. Known kinds: "
                f"{', '.join(sorted(SUFFIXES))}."
            )
        yield from files


def _images(root: Path, folder: Path, held_out: bool | None, ignored: Counter[str]) -> Iterator[File]:
    """The images at any depth below a class folder. Each folder is read once, wherever links lead."""
    seen = {_identity(root), _identity(folder.parent)}  # a link to them would bring in the other classes
    todo = [folder]
    while todo:
        current = todo.pop()
        if _identity(current) in seen:
            continue
        seen.add(_identity(current))
        for entry in _entries(current):
            if entry.is_dir():
                todo.append(Path(entry.path))
            elif _suffix(entry.name) not in SUFFIXES or not entry.is_file():
                ignored[_suffix(entry.name)] += 1
            else:
                found = entry.stat()
                path = Path(entry.path).relative_to(root).as_posix()
                yield File(path, encodable(folder.name), held_out, found.st_size, found.st_mtime_ns)


def _identity(folder: Path) -> tuple[int, int]:
    about = folder.stat()
    return about.st_dev, about.st_ino


def _folders(parent: Path) -> list[Path]:
    return sorted(Path(entry.path) for entry in _entries(parent) if entry.is_dir())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, without hidden ones such as .ipynb_checkpoints."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name
            )
    except OSError as error:
        raise DataError(f"the folder {folder} cannot be read: {error.strerror}.") from error


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _report_ignored(root: Path, ignored: Counter[str]) -> None:
    if ignored:
        kinds = [f"{count} {suffix or 'without a suffix'}" for suffix, count in ignored.most_common()]
        warnings.warn(
            f"{ignored.total()} file(s) below {root} are not used: {listed(kinds, SHOWN)}. Only images in "
            "class folders are.",
            DataWarning,
            stacklevel=3,
        )


def _table(file: Path, columns: tuple[str, str]) -> DataTable:
    if not file.is_file():
        kind = "is a folder" if file.exists() else "does not exist"
        raise ConfigError(f"data.csv={file} {kind}. Give a file with the columns {', '.join(COLUMNS)}.")
    try:
        return read_csv(file, [*columns, (SPLIT, "")])
    except MissingColumnsError as error:
        raise DataError(
            f"data.csv={error} Name those of the paths and the labels with data.image_column=NAME "
            "data.label_column=NAME. A column split (train or val) is optional."
        ) from error


def _is_held_out(word: str, where: str) -> bool:
    if (known := word.strip().lower()) in (*TRAIN, *VALIDATION):
        return known in VALIDATION
    raise DataError(f"{where}: split={word!r} is not one of {', '.join((*TRAIN, *VALIDATION))}.")
