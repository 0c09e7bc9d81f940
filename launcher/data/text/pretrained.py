"""Pretrained encoders of `transformers`, by folder or by the name that the hub knows.

Owns how they are loaded: nothing is downloaded unless a name was given, no pickle is opened, no code of a
repository is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from launcher.config.schema import DataConfig
from launcher.data.libraries import hub_answers, optional
from launcher.data.options import options_of
from launcher.data.text.sentences import SentenceOptions
from launcher.data.text.tokenizer import SentenceTokenizer
from launcher.errors import ConfigError, first_line, listed

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", ".model", ".tiktoken")
UNLIMITED = 10**6  # what `transformers` gives for a tokenizer without a limit is far beyond
FILES_SHOWN = 12


def pretrained_encoder(path: str) -> PretrainedEncoder:
    """The encoder of a folder or a name. Raises ConfigError for a folder without a tokenizer."""
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        return PretrainedEncoder(path, from_hub=True)
    names = sorted(entry.name for entry in folder.iterdir())
    if not any(name.endswith(TOKENIZER_FILES) for name in names):  # `transformers` would take an empty one
        raise ConfigError(
            f"model.path={folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}). It has: "
            f"{listed(names, FILES_SHOWN)}."
        )
    return PretrainedEncoder(str(folder), from_hub=False)


@dataclass(frozen=True)
class PretrainedEncoder:
    """An encoder before it is loaded; each method loads what it returns."""

    path: str
    from_hub: bool

    def tokenizer(self, config: DataConfig) -> SentenceTokenizer:
        """Its tokenizer. Raises ConfigError where data.max_seq_len is more than the model was made for."""
        with self._loading("tokenizer") as how:
            found = optional("transformers").AutoTokenizer.from_pretrained(self.path, **how)
        if not getattr(found, "is_fast", False):
            raise ConfigError(f"model.path={self.path}: its tokenizer has no tokenizer.json: convert it.")
        positions = getattr(self._config, "max_position_embeddings", None) or UNLIMITED
        longest = min(positions, found.model_max_length)  # RoBERTa's has 2 fewer than its model has positions
        asked = options_of(config, SentenceOptions).max_seq_len
        if asked > longest:
            raise ConfigError(
                f"data.max_seq_len={asked} is more than the {longest} tokens that model.path={self.path} can "
                f"read. Set data.max_seq_len to at most {longest}."
            )
        pad = found.pad_token_id
        if pad is None:
            raise ConfigError(f"model.path={self.path}: its tokenizer has no token to fill up with.")
        return SentenceTokenizer(
            found.backend_tokenizer.to_str(),
            pad,
            pads_left=found.padding_side == "left",
            has_types="token_type_ids" in found.model_input_names,
        )

    def classifier(self, num_classes: int) -> nn.Module:
        """The model with a classifier on top, new where it has none for so many classes. fp32, on the CPU."""
        with self._loading("model") as how:
            network = optional("transformers").AutoModelForSequenceClassification.from_pretrained(
                self.path,
                num_labels=num_classes,
                ignore_mismatched_sizes=True,  # a classifier of other classes is of no use
                dtype=torch.float32,
                use_safetensors=True,
                **how,
            )
        assert isinstance(network, nn.Module)
        return network

    @cached_property
    def _local(self) -> bool:
        return not self.from_hub or not hub_answers()

    @cached_property
    def _config(self) -> object:
        with self._loading("config") as how:
            return optional("transformers").AutoConfig.from_pretrained(self.path, **how)

    @contextmanager
    def _loading(self, what: str) -> Iterator[dict[str, object]]:
        """The options of each call that loads; what fails there is a ConfigError."""
        library = optional("transformers")
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        local = self._local
        try:
            yield {"local_files_only": local, "trust_remote_code": False}
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            offline = (
                " The hub does not answer, and its cache has not all of it: give a folder, model.path=DIR, "
                "with config.json, *.safetensors and the tokenizer's files."
            )
            raise ConfigError(
                f"model.path={self.path}: its {what} cannot be loaded: {first_line(error)}"
                f"{offline if self.from_hub and local else ''}"
            ) from error
