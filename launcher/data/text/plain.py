"""Plain text as tokens: characters, bytes or pieces of words, cut into blocks for a language model.

Owns the files that a text is made of, the vocabulary and the division into training and validation. The
vocabulary and the tokens depend on the files and the options alone, so that all ranks have the same.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.config.rules import one_of, whole
from launcher.config.schema import DataConfig
from launcher.data.options import Known, cache, options_of
from launcher.data.tables.files import read_text
from launcher.data.tensor_cache import Stored, cache_folder, cached, size_and_time
from launcher.data.tensors import TensorData
from launcher.data.text.vocabulary import TOKENIZERS, Vocabulary
from launcher.errors import ConfigError, DataError

NOT_LIBRARY = {  # folders beside the sources of the standard library
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
}
TEXTS = (".txt", ".md", ".rst", ".text", ".py")  # read from a folder
OPTIONS: Known = {
    "block_size": (128, whole(1)),
    "tokenizer": ("characters", one_of(*TOKENIZERS)),
    "vocab_size": (4096, whole(1)),
    "cache": cache,
    "sample_tokens": (0, whole(0)),
}


@dataclass(frozen=True)
class TextSet:
    """Blocks of tokens: column "tokens", int32 [n, block_size + 1], each token but the first a target."""

    train: TensorData
    validation: TensorData
    vocabulary: Vocabulary
    block_size: int
    sample_tokens: int  # of a text to show after evaluations; 0: none


def load_text(config: DataConfig) -> TextSet:
    """The text of data.path, a file or a folder; by default the sources of Python's standard library.

    The last `val_fraction` of the text is held out, cut at the start of a line. Raises ConfigError for wrong
    options, DataError for a text that cannot be read or is too short.
    """
    options = options_of(config, OPTIONS)
    kind = TOKENIZERS[options["tokenizer"]]
    files, root = text_files(config.path)
    key = {
        "kind": "text",
        "files": [(file.relative_to(root).as_posix(), *size_and_time(file)) for file in files],
        "tokenizer": kind.version(),
        "vocab_size": options["vocab_size"] if options["tokenizer"] == "bpe" else None,
        "val_fraction": config.val_fraction,
    }
    stored = cached(
        cache_folder(options["cache"]), key, lambda: tokenised(files, config.val_fraction, options)
    )
    vocabulary = kind(stored.texts["vocabulary"])
    where = config.path or "the standard library"
    size = options["block_size"]
    train = blocks(stored.tensors["train"], size, where)
    held_out = stored.tensors["validation"]
    held_out = blocks(held_out, size, where) if config.val_fraction else held_out.new_empty(0, size + 1)
    train_set, validation_set = (TensorData({"tokens": rows}, config.name) for rows in (train, held_out))
    return TextSet(train_set, validation_set, vocabulary, size, options["sample_tokens"])


def text_files(path: str | None) -> tuple[list[Path], Path]:
    """The files of a text, sorted by name, and the folder that they are in."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return _below(root, (".py",), NOT_LIBRARY), root
    given = Path(path).expanduser()
    if given.is_file():
        return [given], given.parent
    if not given.is_dir():
        raise ConfigError(f"data.path={path} is neither a file nor a folder.")
    files = _below(given, TEXTS)
    if not files:
        raise DataError(
            f"data.path={path} contains no texts, that is no file that ends in {', '.join(TEXTS)}."
        )
    return files, given


def tokenised(files: Sequence[Path], val_fraction: float, options: dict[str, Any]) -> Stored:
    """The tokens of both parts, int32, and what the vocabulary is made from again."""
    text = "".join(_ended(read_text(file)) for file in files)
    parts = held_out(text, val_fraction)
    vocabulary = TOKENIZERS[options["tokenizer"]].fitted(text, parts[0], options["vocab_size"])
    tensors = {
        name: torch.from_numpy(vocabulary.encode(part))
        for name, part in zip(("train", "validation"), parts, strict=True)
    }
    return Stored(tensors, {"vocabulary": vocabulary.definition})


def held_out(text: str, val_fraction: float) -> tuple[str, str]:
    """The text and its last part, which begins at the start of a line where there is one near."""
    if not val_fraction:
        return text, ""
    cut = round(len(text) * (1 - val_fraction))
    line = text.rfind("\n", 0, cut) + 1
    return (text[:line], text[line:]) if line > cut // 2 else (text[:cut], text[cut:])


def blocks(tokens: Tensor, size: int, where: str) -> Tensor:
    """int32 [n, size + 1], without a copy: the last token of a block is the first of the next.

    What is left at the end is not used. Raises DataError for fewer tokens than one block has.
    """
    count = (len(tokens) - 1) // size
    if count < 1:
        raise DataError(
            f"{where} has only {len(tokens)} tokens in one of its parts, but data.block_size={size} needs "
            f"{size + 1}. Give a longer text, or a smaller data.block_size."
        )
    return tokens.as_strided((count, size + 1), (size, 1))


def _below(root: Path, suffixes: Collection[str], without: Collection[str] = ()) -> list[Path]:
    """The files below a folder, in the same order on all machines. Folders in `without` are not entered."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without]
        files = (Path(folder, name) for name in names)
        found += [file for file in files if file.suffix.lower() in suffixes and file.is_file()]
    return sorted(found, key=lambda file: file.parts)


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else text + "\n"
