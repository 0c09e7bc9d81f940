"""Photographs in class folders: DIR/class/any/depth/file, or DIR/train/class/... and DIR/val/class/...

Owns which folders are the classes and which are held out. Reads names, sizes and times alone.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.data.images.listing import SHOWN, SUFFIXES, TRAIN, VALIDATION, File, FolderListing, listing_of
from launcher.errors import ConfigError, DataError, DataWarning, listed
from launcher.run_dir.atomic import encodable


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
    parts = _named_parts(root, train, validation) or _usual_parts(root)
    files = [file for part, held_out in parts.items() for file in _labelled(root, part, held_out, ignored)]
    if ignored:
        kinds = [f"{count} {suffix or 'without a suffix'}" for suffix, count in ignored.most_common()]
        warnings.warn(
            f"{ignored.total()} file(s) below {root} are not used: {listed(kinds, SHOWN)}. Only images in "
            "class folders are.",
            DataWarning,
            stacklevel=2,
        )
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


def _usual_parts(root: Path) -> dict[Path, bool | None]:
    """The folders of class folders, and whether they are held out; None: to be split."""
    folders = {folder.name.lower(): folder for folder in _folders(root)}
    train = next((folders[name] for name in TRAIN if name in folders), None)
    held_out = next((folders[name] for name in VALIDATION if name in folders), None)
    if train and held_out and _folders(train):
        return {train: False, held_out: True}
    _refuse_parts(root, list(folders.values()))
    return {root: None}


def _refuse_parts(root: Path, folders: Sequence[Path]) -> None:
    """Raise DataError for folders that are more likely parts of a set than its classes.

    They would be trained on as classes: several with a word for a part in their names, a folder train of
    class folders alone, and folders that all hold the same folders.
    """
    words = {*TRAIN, *VALIDATION}
    named = [folder for folder in folders if words & {*re.split("[^a-z]+", folder.name.lower())}]
    within = [[each.name for each in _folders(folder)] for folder in folders]
    alike = len(folders) > 1 and len(within[0]) > 1 and all(each == within[0] for each in within)
    if len(named) > 1 or alike or any(len(_folders(folder)) > 1 for folder in named):
        names = [f"{folder.name}/" for folder in folders]
        raise DataError(
            f"data.path={root} has {listed(names, SHOWN)}, which seem to be the parts of a set, not its "
            "classes. Name the folders that hold one folder per class: data.train=NAME data.validation=NAME, "
            "or data.train=NAME alone to hold out a part of it; data.train=. if these are the classes."
        )


def _labelled(root: Path, parent: Path, held_out: bool | None, ignored: Counter[str]) -> Iterator[File]:
    """The images of each class folder of `parent`, at any depth below it."""
    classes = _folders(parent)
    if not classes:
        raise DataError(
            f"{parent} has no class folders. Put the images of each class into a folder of its name: "
            f"{parent}/cats/1.jpg. It has: {listed(sorted(os.listdir(parent)), SHOWN) or 'nothing'}."
        )
    ignored.update(_suffix(entry.name) for entry in _entries(parent) if entry.is_file())
    for folder in classes:
        files = list(_images(root, folder, encodable(folder.name), held_out, ignored))
        if not files:
            raise DataError(
                f"the class folder {folder} has no images. Remove it, or put some in. Known kinds: "
                f"{', '.join(sorted(SUFFIXES))}."
            )
        yield from files


def _images(
    root: Path, folder: Path, label: str, held_out: bool | None, ignored: Counter[str]
) -> Iterator[File]:
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):  # a link to a folder could lead in a circle
            yield from _images(root, Path(entry.path), label, held_out, ignored)
        elif _suffix(entry.name) not in SUFFIXES or not entry.is_file():
            ignored[_suffix(entry.name)] += 1
        else:
            found, path = entry.stat(), Path(entry.path).relative_to(root).as_posix()
            yield File(path, label, held_out, found.st_size, found.st_mtime_ns)


def _folders(parent: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(parent) if entry.is_dir()]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder by name, without hidden ones such as .ipynb_checkpoints."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"the folder {folder} cannot be read: {error.strerror}.") from error
    return sorted(found, key=lambda entry: entry.name)


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()
