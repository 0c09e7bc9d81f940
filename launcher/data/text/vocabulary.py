"""The vocabularies of a plain text: its characters, bytes, or pieces of words by byte-pair encoding.

Owns encoding and decoding. A vocabulary is a pure function of the text that it is fitted to; its own `texts`
make it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from launcher.data.text.library import tokenizers_library, without_threads
from launcher.errors import ConfigError

Int32Array = np.ndarray[Any, np.dtype[np.int32]]
PIECE = 1 << 16  # characters that are encoded at a time


class Vocabulary(Protocol):
    """Tokens of a text, numbered from 0."""

    @property
    def size(self) -> int:
        """The number of tokens."""
        ...

    def encode(self, text: str) -> Int32Array:
        """The tokens of a text, all of which the vocabulary has."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens; what is no text of its own becomes a replacement character."""
        ...

    def texts(self) -> dict[str, str]:
        """What makes the vocabulary again: see `vocabulary_from`."""
        ...


@dataclass(frozen=True)
class Characters:
    """Each character of the text is a token, in the order of their code points."""

    name: ClassVar[str] = "characters"
    characters: str

    @classmethod
    def fitted(cls, text: str, train: str, size: int) -> Characters:
        """The characters of the whole text: of a character there is nothing to learn beforehand."""
        return cls("".join(map(chr, np.unique(_code_points(text)))))

    @classmethod
    def version(cls) -> str:
        return cls.name

    @property
    def size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Int32Array:
        found: Int32Array = np.searchsorted(_code_points(self.characters), _code_points(text)).astype(
            np.int32
        )
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in tokens)

    def texts(self) -> dict[str, str]:
        return {"tokenizer": self.name, "vocabulary": self.characters}


@dataclass(frozen=True)
class Bytes:
    """Each byte of the text in UTF-8 is a token."""

    name: ClassVar[str] = "bytes"
    size: int = 256

    @classmethod
    def fitted(cls, text: str, train: str, size: int) -> Bytes:
        return cls()

    @classmethod
    def version(cls) -> str:
        return cls.name

    def encode(self, text: str) -> Int32Array:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def texts(self) -> dict[str, str]:
        return {"tokenizer": self.name, "vocabulary": ""}


class BytePairs:
    """Byte-pair encoding (Sennrich et al., 2016, arXiv:1508.07909) over bytes, as in GPT-2."""

    name: ClassVar[str] = "bpe"

    def __init__(self, definition: str) -> None:
        self._tokenizer = tokenizers_library().Tokenizer.from_str(definition)
        self.size = int(self._tokenizer.get_vocab_size())

    @classmethod
    def fitted(cls, text: str, train: str, size: int) -> BytePairs:
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

    def encode(self, text: str) -> Int32Array:
        with without_threads():
            parts = [np.array(self._tokenizer.encode(piece).ids, np.int32) for piece in _pieces(text)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def texts(self) -> dict[str, str]:
        return {"tokenizer": self.name, "vocabulary": self._tokenizer.to_str()}


def vocabulary_from(texts: Mapping[str, str]) -> Vocabulary:
    """The vocabulary that gave these texts."""
    made: Mapping[str, Callable[[str], Vocabulary]] = {
        Characters.name: Characters,
        Bytes.name: lambda text: Bytes(),
        BytePairs.name: BytePairs,
    }
    return made[texts["tokenizer"]](texts["vocabulary"])


def _code_points(text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _pieces(text: str) -> Iterator[str]:
    """The text in parts that end with a line, so that they are encoded as the whole text would be."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


TOKENIZERS: Mapping[str, type[Characters] | type[Bytes] | type[BytePairs]] = {
    each.name: each for each in (Characters, Bytes, BytePairs)
}
