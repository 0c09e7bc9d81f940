"""Which files of a folder are the parts of a data set, by their names.

Knows the usual words for training and validation; never opens a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

MADE_OF_WORDS = "set|data|val|dev|test"


def part_named(files: Sequence[Path], words: Sequence[str], of: str = "") -> Path | None:
    """The first file whose name begins with one of the words, or else has one among its words, in any case.

    Of several the one that has the words `of` too, such as a language or `matched`.
    """
    also = set(words_of(of))
    for word in words:
        begin = [file for file in files if begins_with_word(file.name, word)]
        within = [file for file in files if word in words_of(file.stem)]
        for found in (begin, within):
            if narrowed := [file for file in found if also <= set(words_of(file.stem))] or found:
                return narrowed[0]
    return None


def begins_with_word(name: str, word: str) -> bool:
    """Whether a file's name begins with this word: "val" with val.csv, val2017 and valSet, not values.csv.

    Or with one that is made of it and is usual for parts of data, as training, testset or trainval.
    """
    # The last part sees where the next word begins: at no letter, or at a capital after a small one.
    return bool(re.match(rf"(?i:{word}(ing)?({MADE_OF_WORDS})?)(?![a-z]|(?<=[A-Z])[A-Z])", name))


def words_of(name: str) -> list[str]:
    return re.findall(r"[a-z]+", name.lower())
