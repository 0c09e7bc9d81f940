"""Plain text as tokens: characters or pieces of words, cut into blocks for a language model.

Owns the files that a text is made of, the vocabulary and the division into training and validation. The
vocabulary and the tokens depend on the files and the options alone, so that all ranks have the same; a
vocabulary is made again from its own `definition`.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.config.constraints import one_of, whole
from launcher.config.schema import DataConfig
from launcher.data.libraries import optional
from launcher.data.options import Cache, Count, options_of
from launcher.data.tensor_cache import Stored, cache_folder, cached, size_and_time
from launcher.data.tensors import TensorData
from launcher.errors import DataError, first_line

Int32Array = NDArray[np.int32]
PIECE = 1 << 16  # characters that are encoded at a time
# Folders beside the sources of the standard library.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TEXTS = (".txt", ".md", ".rst", ".text", ".py")  # read from a folder


@dataclass(frozen=True)
class Characters:
    """Each character of the text is a token, in the order of their code points. They are the definition."""

    definition: str

    @classmethod
    def fitted(cls, text: str, train: str, size: int) -> Self:
        """The characters of the whole text: of a character there is nothing to learn beforehand."""
        return cls("".join(map(chr, np.unique(_code_points(text)))))

    @property
    def size(self) -> int:
        return len(self.definition)

    def encode(self, text: str) -> Int32Array:
        return np.searchsorted(_code_points(self.definition), _code_points(text)).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.definition[token] for token in tokens)


@dataclass(frozen=True)
class BytePairs:
    """Byte-pair encoding (Sennrich et al., 2016, arXiv:1508.07909) over bytes, as in GPT-2.

    The definition is the JSON of the `tokenizers` package.
    """

    definition: str

    @cached_property
    def _tokenizer(self) -> Any:
        return optional("tokenizers").Tokenizer.from_str(self.definition)

    @classmethod
    def fitted(cls, text: str, train: str, size: int) -> Self:
        """At most `size` tokens, or one per byte, fitted to the training part."""
        library = optional("tokenizers")
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_pieces(train), trainer)
        return cls(tokenizer.to_str())

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> Int32Array:
        parts = [np.array(self._tokenizer.encode(piece).ids, np.int32) for piece in _pieces(text)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _pieces(text: str) -> Iterator[str]:
    """The text in parts that end with a line, so that they are encoded as the whole text would be."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


# Of a text, of which a part may be learned from, `fitted` makes a vocabulary: tokens, numbered from 0. Equal
# definitions make equal ones, which have all tokens of that text.
Vocabulary = Characters | BytePairs
TOKENIZERS: Mapping[str, type[Vocabulary]] = {"characters": Characters, "bpe": BytePairs}


@dataclass(frozen=True)
class TextOptions:
    """The keys of data=text."""

    block_size: Count = 128
    tokenizer: Annotated[str, one_of(*TOKENIZERS)] = "characters"
    vocab_size: Count = 4096
    cache: Cache = "auto"
    sample_tokens: Annotated[int, whole(0)] = 0


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
    options = options_of(config, TextOptions)
    kind = TOKENIZERS[options.tokenizer]
    files, root = text_files(config.path)
    # What may change the tokens of a text beside its kind.
    fitted = (options.vocab_size, optional("tokenizers").__version__) if kind is BytePairs else None
    key = {
        "kind": "text",
        "files": [(file.relative_to(root).as_posix(), *size_and_time(file)) for file in files],
        "tokenizer": options.tokenizer,
        "fitted": fitted,
        "val_fraction": config.val_fraction,
    }
    stored = cached(cache_folder(options.cache), key, lambda: tokenised(files, config.val_fraction, options))
    vocabulary = kind(stored.texts["vocabulary"])
    where = config.path or "the standard library"
    size = options.block_size
    train = blocks(stored.tensors["train"], size, where)
    held_out = stored.tensors["validation"]
    held_out = blocks(held_out, size, where) if config.val_fraction else held_out.new_empty(0, size + 1)
    train_set, validation_set = (TensorData({"tokens": rows}, config.name) for rows in (train, held_out))
    return TextSet(train_set, validation_set, vocabulary, size, options.sample_tokens)


def text_files(path: str | None) -> tuple[list[Path], Path]:
    """The files of a text, sorted by name, and the folder that they are in."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return _below(root, (".py",), NOT_LIBRARY), root
    given = Path(os.path.expanduser(path))
    if given.is_file():
        return [given], given.parent
    if files := _below(given, TEXTS):
        return files, given
    raise DataError(f"data.path={path} contains no texts, that is no file that ends in {', '.join(TEXTS)}.")


def tokenised(files: Sequence[Path], val_fraction: float, options: TextOptions) -> Stored:
    """The tokens of both parts, int32, and what the vocabulary is made from again."""
    contents = map(read_text, files)
    text = "".join(each if each.endswith("\n") or not each else f"{each}\n" for each in contents)
    parts = held_out(text, val_fraction)
    vocabulary = TOKENIZERS[options.tokenizer].fitted(text, parts[0], options.vocab_size)
    train, validation = (torch.from_numpy(vocabulary.encode(part)) for part in parts)
    return Stored({"train": train, "validation": validation}, {"vocabulary": vocabulary.definition})


def read_text(file: Path) -> str:
    """The text of a UTF-8 file, without a mark of its byte order. Raises DataError."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8: {first_line(error)}") from error


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
