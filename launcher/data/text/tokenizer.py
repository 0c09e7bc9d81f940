"""Tokenizers of sentences: a WordPiece vocabulary fitted to the training text, or that of a pretrained model.

Both are a `Tokenizer` of the `tokenizers` package, a value that its JSON text makes again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.data.libraries import optional

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WITHIN = "##"  # before a piece that does not begin a word
LOWEST_COUNT = 2  # of a piece that becomes a token
PIECE = 1000  # sentences that are encoded at a time

Encoded = tuple[list[int], list[int], bool]  # tokens, types (0: first sentence), whether it was cut


@dataclass(frozen=True)
class SentenceTokenizer:
    """Sentences, or pairs of them, as tokens. `definition` is the JSON of the `tokenizers` package."""

    definition: str
    pad: int  # the token that fills up a batch
    pads_left: bool = False
    has_types: bool = True  # whether the model's input says which sentence a token is of

    @property
    def vocab_size(self) -> int:
        """One more than the highest token."""
        return 1 + max(self.get_vocab().values())

    def get_vocab(self) -> dict[str, int]:
        """The number of each token."""
        return dict(self.library_object().get_vocab(with_added_tokens=True))

    def encode(self, sentences: Sequence[object], max_length: int) -> Iterator[Encoded]:
        """Encode texts or pairs of texts. The longer one of a pair is cut where both do not fit."""
        tokenizer = self.library_object()
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length, strategy="longest_first")
        pieces = [list(sentences[start : start + PIECE]) for start in range(0, len(sentences), PIECE)]
        workers = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(workers) as pool:  # it computes without Python's lock
            for encodings in pool.map(tokenizer.encode_batch, pieces):
                for each in encodings:
                    yield each.ids, each.type_ids, bool(each.overflowing)

    def save_pretrained(self, folder: Path) -> None:
        """Write the files that AutoTokenizer.from_pretrained reads."""
        library = self.library_object()
        types = ["token_type_ids"] if self.has_types else []
        optional("transformers").PreTrainedTokenizerFast(
            tokenizer_object=library,
            pad_token=library.id_to_token(self.pad),
            padding_side="left" if self.pads_left else "right",
            model_input_names=["input_ids", *types, "attention_mask"],
        ).save_pretrained(folder)

    def library_object(self) -> Any:
        """A new `tokenizers.Tokenizer`."""
        return optional("tokenizers").Tokenizer.from_str(self.definition)


def fitted(sentences: Sequence[str], vocab_size: int, lower_case: bool) -> SentenceTokenizer:
    """WordPiece as in BERT (Devlin et al., 2019, arXiv:1810.04805), fitted to these sentences.

    A pure function of them. All characters are tokens, also where these are more than `vocab_size`.
    """
    library = optional("tokenizers")
    normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
    splitter = library.pre_tokenizers.BertPreTokenizer()
    characters = sorted({c for text in sentences for c in normalizer.normalize_str(text) if not c.isspace()})
    # The trainer numbers what it meets in the order of a hash table with a random key, and settles ties by
    # these numbers. Given beforehand, the numbers are always the same.
    first = [*SPECIAL, *characters, *(WITHIN + each for each in characters)]
    trained = library.Tokenizer(library.models.WordPiece(unk_token=UNKNOWN))
    trained.normalizer, trained.pre_tokenizer = normalizer, splitter
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=LOWEST_COUNT,
        special_tokens=first,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    trained.train_from_iterator(sentences, trainer)
    # Another tokenizer of this vocabulary, in which those of SPECIAL alone are special tokens.
    vocabulary = trained.get_vocab(with_added_tokens=True)
    tokenizer = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = library.decoders.WordPiece(prefix=WITHIN)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(each, vocabulary[each]) for each in (CLS, SEP)],
    )
    return SentenceTokenizer(tokenizer.to_str(), vocabulary[PAD])
