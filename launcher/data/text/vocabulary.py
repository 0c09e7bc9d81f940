"""The vocabularies of a plain text: its characters, bytes, or pieces of words by byte-pair encoding.

Owns encoding and decoding. A vocabulary is a pure function of the text that it is fitted to, and its own
`definition` makes it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from launcher.data.libraries import tokenizers_library, without_threads
from launcher.errors import ConfigError

Int32Array = np.ndarray[Any, np.dtype[np.int32]]
PIECE = 1 << 16  # characters that are encoded at a time


@dataclass(frozen=True)
class Vocabulary(ABC):
    """Tokens of a text, numbered from 0. Equal definitions make equal vocabularies."""

    name: ClassVar[str]
    definition: str

    @classmethod
    @abstractmethod
    def fitted(cls, text: str, train: str, size: int) -> Self:
        """The vocabulary of a text, of which `train` is the part that may be learned from."""

    @classmethod
    def version(cls) -> str:
        """A text that changes with whatever may change the tokens of a text."""
        return cls.name

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of tokens."""

    @abstractmethod
    def encode(self, text: str) -> Int32Array:
        """The tokens of a text, all of which the vocabulary has."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens; bytes that are not UTF-8 become replacement characters."""


class Characters(Vocabulary):
    """Each character of the text is a token, in the order of their code points. They are the definition."""

    name = "characters"

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


class Bytes(Vocabulary):
    """Each byte of the text in UTF-8 is a token. The definition is empty."""

    name = "bytes"
    size = 256

    @classmethod
    def fitted(cls, text: str, train: str, size: int) -> Self:
        return cls("")

    def encode(self, text: str) -> Int32Array:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class BytePairs(Vocabulary):
    """Byte-pair encoding (Sennrich et al., 2016, arXiv:1508.07909) over bytes, as in GPT-2.

    The definition is the JSON of the `tokenizers` package.
    """

    name = "bpe"

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizers_library().Tokenizer.from_str(self.definition)

    @classmethod
    def fitted(cls, text: str, train: str, size: int) -> Self:
        """At most `size` tokens, fitted to the training part. Raises ConfigError for fewer than 256."""
        if size < 256:
            raise ConfigError(
                f"data.vocab_size={size}: byte-pair encoding needs at least 256, one for each byte."
            )
        library = tokenizers_library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with without_threads():
            tokenizer.train_from_iterator(_pieces(train), trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def version(cls) -> str:
        return f"{cls.name} of tokenizers {tokenizers_library().__version__}"

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> Int32Array:
        with without_threads():
            parts = [np.array(self._tokenizer.encode(piece).ids, np.int32) for piece in _pieces(text)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def _code_points(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _pieces(text: str) -> Iterator[str]:
    """The text in parts that end with a line, so that they are encoded as the whole text would be."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


TOKENIZERS: Mapping[str, type[Vocabulary]] = {each.name: each for each in (Characters, Bytes, BytePairs)}
