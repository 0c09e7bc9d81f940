"""Which files of a folder are the parts of a data set, by their names.

Knows the usual words for training and validation; never opens a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

TRAIN = ("train", "training")  # words of files, folders, splits and cells of a CSV, in any case
VALIDATION = ("validation", "valid", "val", "dev", "test", "testing")  # likewise; the first that there is


def part_named(files: Sequence[Path], words: Sequence[str], of: str = "") -> Path | None:
    """The first file with one of these words among those of its name, in any case.

    Of several the one that has the words `of` too, such as a language or `matched`.
    """
    for word in words:
        found = [file for file in files if word in words_of(file.stem)]
        also = [file for file in found if set(words_of(of)) <= set(words_of(file.stem))]
        if also or found:
            return (also or found)[0]
    return None


def words_of(name: str) -> list[str]:
    """The words of a name in small letters: val2017 has val."""
    return re.findall(r"[a-z]+", name.lower())
