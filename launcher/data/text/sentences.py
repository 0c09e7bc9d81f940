"""Labelled sentences, or pairs of them, as rows of tokens, padded to the longest of a micro-batch.

Owns the files and columns that they come from, the classes, and the division into training and validation.
The tokens are made once per machine and mapped. Which model reads them is the recipe's.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from launcher.config.constraints import Constraint, list_of, string, whole
from launcher.config.schema import DataConfig
from launcher.data.libraries import optional
from launcher.data.options import Cache, Text, options_of
from launcher.data.split import label_to_index, natural, numbered, refuse_one_class, stratified_split
from launcher.data.tables import (
    DataTable,
    read_table,
    split_files,
    validation_file,
)
from launcher.data.tensor_cache import Stored, cache_folder, cached, size_and_time
from launcher.data.tensors import Batch
from launcher.data.text.tokenizer import SentenceTokenizer, fitted
from launcher.errors import ConfigError, DataError, DataWarning, listed

MULTIPLE = 8  # of which the length of a batch is: tensor cores want it
LANGUAGES_SHOWN = 12  # in an error
text = string("a text", lambda value: True)
Texts = Annotated[str, text] | Annotated[Sequence[str], list_of(text, "a list of texts")]
SAME_LABELS = Constraint("a mapping of labels to labels", lambda value: isinstance(value, Mapping))


@dataclass(frozen=True)
class SentenceOptions:
    """The keys of data=sentences."""

    sentence1: Texts = "sentence1"
    sentence2: Texts | None = None
    label: Texts = "label"
    unlabelled: Texts | None = None
    same_labels: Annotated[Mapping[str, str], SAME_LABELS] = field(default_factory=dict)
    language: Text | None = None
    validation: Texts | None = None
    max_seq_len: Annotated[int, whole(4)] = 128
    vocab_size: Annotated[int, whole(8)] = 8192
    lower_case: bool = True
    cache: Cache = "auto"

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """The columns of a table that are read, and their names there."""
        given = {"sentence1": self.sentence1, "sentence2": self.sentence2, "label": self.label}
        named = {name: _texts(each) for name, each in given.items() if each is not None}
        return named | ({"language": ("language",)} if self.language else {})


@dataclass(frozen=True)
class SentenceSet:
    """What a classifier of sentences is trained and evaluated on: one validation set or several, by name."""

    train: TokenRows
    validation: Mapping[str, TokenRows]
    classes: tuple[str, ...]
    vocab_size: int
    pad: int
    max_seq_len: int

    @property
    def validation_sets(self) -> TokenRows | dict[str, TokenRows]:
        """The validation sets as a recipe takes them: a single set without its name, none as no sets."""
        only = len(self.validation) == 1
        return next(iter(self.validation.values())) if only else dict(self.validation)


class TokenRows:
    """A map-style data set: sample i is its tokens and types, both [length], and its label."""

    def __init__(self, tensors: Mapping[str, Tensor], tokenizer: SentenceTokenizer, name: str) -> None:
        self.name = name
        self.labels = tensors["labels"]  # int64 [n]
        self.lengths = tensors["starts"].diff()  # int64 [n]
        self._tokens = tensors["tokens"].numpy()  # int32 [sum of the lengths]
        self._types = tensors["types"].numpy()  # uint8, likewise
        self._starts = tensors["starts"].tolist()
        self._classes = tensors["labels"].tolist()
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[object, object, int]:
        row = slice(self._starts[index], self._starts[index + 1])
        # Copies: what is written into the tokens, such as masks, would be in them for all later epochs.
        return self._tokens[row].copy(), self._types[row].copy(), self._classes[index]

    def collate(self, samples: Sequence[tuple[Any, Any, int]]) -> Batch:
        """int64 [n, longest, rounded up to 8]: input_ids, attention_mask, token_type_ids; label int64 [n].

        Without token_type_ids where the model takes none.
        """
        length = -(-max(len(tokens) for tokens, _, _ in samples) // MULTIPLE) * MULTIPLE
        ids = np.full((len(samples), length), self.tokenizer.pad, np.int64)
        types, mask = np.zeros_like(ids), np.zeros_like(ids)
        for row, (tokens, kinds, _) in enumerate(samples):
            place = slice(length - len(tokens), length) if self.tokenizer.pads_left else slice(len(tokens))
            ids[row, place], types[row, place], mask[row, place] = tokens, kinds, 1
        columns = {"input_ids": ids, "attention_mask": mask}
        if self.tokenizer.has_types:
            columns["token_type_ids"] = types
        batch = {name: torch.from_numpy(values) for name, values in columns.items()}
        return {**batch, "label": torch.tensor([label for _, _, label in samples])}


def load_sentences(config: DataConfig, pretrained: SentenceTokenizer | None = None) -> SentenceSet:
    """The sentences of data.path, by `pretrained` or by a tokenizer that is fitted to the training part.

    Raises ConfigError for wrong options, DataError for files that cannot be used: see `tables`, and labels.
    """
    options = options_of(config, SentenceOptions)
    files = sentence_files(config.path, options.validation, options.language)
    key = {
        "kind": "sentences",
        "files": {name: [str(file), *size_and_time(file)] for name, file in files.items()},
        "options": vars(options) | {"cache": None, "validation": None},  # the latter are in `files`
        "val_fraction": config.val_fraction,
        "tokenizer": pretrained.definition if pretrained else None,
        "tokenizers": optional("tokenizers").__version__,
    }
    stored = cached(cache_folder(options.cache), key, lambda: _tokenised(files, config, options, pretrained))
    facts = json.loads(stored.texts["facts"])
    if facts["notice"]:
        warnings.warn(facts["notice"], DataWarning, stacklevel=2)
    tokenizer = pretrained or SentenceTokenizer(stored.texts["tokenizer"], facts["pad"])
    rows = {name: TokenRows(stored.part(name), tokenizer, str(config.name)) for name in facts["parts"]}
    train, classes = rows.pop("train"), tuple(facts["classes"])
    return SentenceSet(train, rows, classes, facts["vocab_size"], tokenizer.pad, options.max_seq_len)


def sentence_files(
    path: str | None, validation: str | Sequence[str] | None, language: str | None = None
) -> dict[str, Path]:
    """The file to train on, as "train", and those to validate on: none where a part of it is held out."""
    if path is None:
        raise ConfigError(
            "data.path is not set. Give a .tsv, .csv, .jsonl or .parquet file with a row for each sentence, "
            "or a folder with train.tsv and, if there is one, dev.tsv or test.tsv."
        )
    train, found = split_files(Path(os.path.expanduser(path)), language or "")
    if validation is None:
        return {"train": train} | ({"validation": found} if found else {})
    names = _texts(validation)
    files = {Path(name).stem: validation_file(train.parent, name) for name in names}
    if "train" in files or len(files) < len(names):
        raise ConfigError(f"data.validation={validation}: names without suffix must differ, also from train.")
    if missing := [file for file in files.values() if not file.is_file()]:
        raise ConfigError(f"data.validation={validation}: there is no file {missing[0]}.")
    files = {"train": train, **files}
    for (one, file), (other, again) in itertools.combinations(files.items(), 2):
        if file.samefile(again):
            raise ConfigError(
                f"data.validation={validation}: {one} and {other} are the same file, {file}. Name each file "
                "that there is once, and not the one that is trained on."
            )
    return files


def _tokenised(
    files: Mapping[str, Path],
    config: DataConfig,
    options: SentenceOptions,
    pretrained: SentenceTokenizer | None,
) -> Stored:
    """The rows of all parts as tensors, and what was learned of them as texts."""
    tables = {name: read_table(file, options.columns) for name, file in files.items()}
    left_out = Counter[str]()  # rows, by the reason
    kept = {name: _labelled(table, options, left_out) for name, table in tables.items()}
    labels = _labels(kept["train"], options)
    classes = sorted(set(labels), key=natural)
    refuse_one_class(classes, f"the label of {files['train']}")
    if len(kept) == 1 and config.val_fraction:
        whole = kept["train"]
        rows = stratified_split(numbered(labels), config.val_fraction, f"rows of {whole.file}")
        kept = {name: whole.select(part) for name, part in zip(("train", "validation"), rows, strict=True)}
    sentences = {name: _sentences(table) for name, table in kept.items()}
    texts = [text for each in sentences["train"] for text in ([each] if isinstance(each, str) else each)]
    tokenizer = pretrained or fitted(texts, options.vocab_size, options.lower_case)
    tensors: dict[str, Tensor] = {}
    cut = 0
    for name, table in kept.items():
        part, shortened = _rows(tokenizer, sentences[name], options.max_seq_len)
        cut += shortened
        part["labels"] = _numbers(table, options, classes)
        tensors |= {f"{name}/{column}": tensor for column, tensor in part.items()}
    notices = [f"{count:,} rows {why} and are left out" for why, count in left_out.items() if count]
    if cut:
        notices.append(
            f"{cut:,} of {sum(map(len, kept.values())):,} rows are longer than data.max_seq_len="
            f"{options.max_seq_len} tokens and were cut"
        )
    facts = {
        "parts": list(kept),
        "classes": classes,
        "pad": tokenizer.pad,
        "vocab_size": tokenizer.vocab_size,
        "notice": "; ".join(notices),
    }
    return Stored(tensors, {"facts": json.dumps(facts), "tokenizer": tokenizer.definition})


def _texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """An option that is one text or several, as a tuple."""
    return (given,) if isinstance(given, str) else tuple(given)


def _labels(table: DataTable, options: SentenceOptions) -> list[str]:
    """The labels as text, those that mean the same as one."""
    return [options.same_labels.get(label, label) for label in table.texts("label")]


def _labelled(table: DataTable, options: SentenceOptions, left_out: Counter[str]) -> DataTable:
    """The rows of the language with a label; those that are `left_out` are counted.

    Raises DataError where none is left or none is of the language, and for an empty cell: it is no class.
    """
    languages, labels = table.columns.get("language"), table.columns["label"]
    rows = [row for row in range(len(table)) if not languages or languages[row] == options.language]
    left_out[f"are not of data.language={options.language}"] += len(table) - len(rows)
    if languages and not rows:
        there = listed(sorted(set(map(str, languages))), LANGUAGES_SHOWN)
        raise DataError(f"{table.file}: no row has data.language={options.language}. It has: {there}.")
    none = () if options.unlabelled is None else _texts(options.unlabelled)
    kept = [row for row in rows if labels[row] is None or str(labels[row]) not in none]
    if not kept:
        raise DataError(
            f"{table.file}: no row of data.language={options.language} has another label than "
            f"data.unlabelled={options.unlabelled}."
        )
    if empty := [row for row in kept if isinstance(labels[row], str) and not labels[row].strip()]:
        raise DataError(
            f"{table.place(empty[0])}: the label is empty, in {len(empty):,} of {len(rows):,} rows. Give "
            "these rows a label, or leave them out: 'data.unlabelled=\"\"'."
        )
    without = (str(labels[row]) for row in rows if labels[row] is not None and str(labels[row]) in none)
    left_out.update(f"have the label {label!r}" for label in without)
    return table.select(kept)


def _sentences(table: DataTable) -> list[Any]:
    """The sentences, or the pairs of them."""
    first = table.texts("sentence1")
    return list(zip(first, table.texts("sentence2"), strict=True)) if "sentence2" in table.columns else first


def _rows(
    tokenizer: SentenceTokenizer, sentences: Sequence[object], max_seq_len: int
) -> tuple[dict[str, Tensor], int]:
    """Tokens and types end to end, where each row starts, and how many rows were cut."""
    rows = [
        (np.array(ids, np.int32), np.array(kinds, np.uint8), shortened)
        for ids, kinds, shortened in tokenizer.encode(sentences, max_seq_len)
    ]
    tokens, types, cut = zip(*rows, strict=True)
    starts = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    found = {"tokens": np.concatenate(tokens), "types": np.concatenate(types), "starts": starts}
    return {name: torch.from_numpy(values) for name, values in found.items()}, sum(cut)


def _numbers(table: DataTable, options: SentenceOptions, classes: Sequence[str]) -> Tensor:
    """The labels as int64 [n]. Raises DataError for one that the training part does not have."""
    advice = " data.unlabelled names those that stand for none, data.same_labels those that mean the same."
    return torch.tensor(label_to_index(_labels(table, options), classes, table.place, advice))
