"""Photographs in class folders: DIR/class/any/depth/file, or DIR/train/class/... and DIR/val/class/...

Owns which folders are the classes and which are held out. Reads names, sizes and times alone.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from launcher.data.images.image_index import SHOWN, SUFFIXES, File, ImageIndex, index_of_files
from launcher.data.part_files import TRAIN, VALIDATION
from launcher.errors import ConfigError, DataError, DataWarning, listed
from launcher.run_dir.atomic import encodable


def list_folder(
    root: Path, val_fraction: float, train: str | None = None, validation: str | None = None
) -> ImageIndex:
    """The images below class folders. Raises ConfigError or DataError for what cannot be trained on.

    `train` and `validation` name the folders of a set that comes with a split, where their names do not.
    """
    ignored: Counter[str] = Counter()
    try:
        parts = _named_parts(root, train, validation) or _usual_parts(root)
        files = [file for part, out in parts.items() for file in _labelled(root, part, out, ignored)]
    except OSError as error:
        raise DataError(f"the folder {error.filename} cannot be read: {error.strerror}.") from error
    if ignored:
        kinds = [f"{count} {suffix or 'without a suffix'}" for suffix, count in ignored.most_common()]
        warnings.warn(
            f"{ignored.total()} file(s) below {root} are not used: {listed(kinds, SHOWN)}. Only images in "
            "class folders are.",
            DataWarning,
            stacklevel=2,
        )
    return index_of_files(root, files, val_fraction, f"data.path={root}")


def _named_parts(root: Path, train: str | None, validation: str | None) -> dict[Path, bool | None]:
    """The folders that the config names, and whether they are held out; empty where it names none."""
    if train is None and validation is not None:
        raise ConfigError(f"data.validation={validation} needs data.train, the folder to train on.")
    if train is None:
        return {}
    return {root / train: None} if validation is None else {root / train: False, root / validation: True}


def _usual_parts(root: Path) -> dict[Path, bool | None]:
    """The folders of class folders, and whether they are held out; None: to be split.

    Raises DataError for folders that are more likely parts of a set than its classes: several with a word for
    a part in their names, or one that has folders itself. They would be trained on as classes.
    """
    folders = {folder.name.lower(): folder for folder in _folders(root)}
    train = next((folders[name] for name in TRAIN if name in folders), None)
    held_out = next((folders[name] for name in VALIDATION if name in folders), None)
    if train and held_out and _folders(train):
        return {train: False, held_out: True}
    named = [
        folder for name, folder in folders.items() if {*TRAIN, *VALIDATION} & {*re.split("[^a-z]+", name)}
    ]
    if len(named) > 1 or any(len(_folders(folder)) > 1 for folder in named):
        names = [f"{folder.name}/" for folder in folders.values()]
        raise DataError(
            f"data.path={root} has {listed(names, SHOWN)}, which seem to be the parts of a set, not its "
            "classes. Name the folders that hold one folder per class: data.train=NAME data.validation=NAME, "
            "or data.train=NAME alone to hold out a part of it; data.train=. if these are the classes."
        )
    return {root: None}


def _labelled(root: Path, parent: Path, held_out: bool | None, ignored: Counter[str]) -> Iterator[File]:
    """The images of each class folder of `parent`, at any depth below it."""
    classes = _folders(parent)
    if not classes:
        raise DataError(
            f"{parent} has no class folders. Put the images of each class into a folder of its name: "
            f"{parent}/cats/1.jpg. It has: {listed(sorted(os.listdir(parent)), SHOWN) or 'nothing'}."
        )
    ignored.update(path.suffix.lower() for path in _shown(parent) if path.is_file())
    for folder in classes:
        files = [path for path in _files(folder) if _is_image(path, ignored)]
        if not files:
            raise DataError(
                f"the class folder {folder} has no images. Remove it, or put some in. Known kinds: "
                f"{', '.join(sorted(SUFFIXES))}."
            )
        for path in files:
            found, name = path.stat(), path.relative_to(root).as_posix()
            yield File(name, encodable(folder.name), held_out, found.st_size, found.st_mtime_ns)


def _files(folder: Path) -> Iterator[Path]:
    """The files of a folder at any depth. Links to folders are not followed: they could lead in a circle."""

    def fail(error: OSError) -> NoReturn:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _is_image(path: Path, ignored: Counter[str]) -> bool:
    """Whether it is, by its name; others are counted."""
    if path.suffix.lower() in SUFFIXES and path.is_file():
        return True
    ignored[path.suffix.lower()] += 1
    return False


def _folders(parent: Path) -> list[Path]:
    return [path for path in _shown(parent) if path.is_dir()]


def _shown(folder: Path) -> list[Path]:
    """The entries of a folder by name, without hidden ones such as .ipynb_checkpoints."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
