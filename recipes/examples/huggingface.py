"""A model of `transformers` on a data set of `datasets`, both as they are.

The model is built from a config and the data set from a dictionary, so nothing is downloaded.
`AutoModelForSequenceClassification.from_pretrained(NAME)` and `load_dataset(NAME)` take their places. The
task: does a sentence have more tokens 1 than tokens 2?

    scripts/run recipe=recipes/examples/huggingface.py optim=adamw optim.lr=1e-3 data.batch_size=64 \
        optim.decay_norm_and_bias=false train.epochs=3
"""

from __future__ import annotations

import random

from datasets import Dataset
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, BertConfig

from launcher.recipe import Batch, Config, Loss, Recipe, recipe

LENGTH, VOCABULARY = 12, 8


@recipe
def huggingface(config: Config) -> Recipe:
    small = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return Recipe(
        build_model=lambda: AutoModelForSequenceClassification.from_config(small),
        train=sentences(1200),
        validation=sentences(240),
        loss=sentence_loss,
        classes=("fewer", "more"),
    )


def sentences(number: int) -> Dataset:
    """Columns input_ids [n, 12], attention_mask [n, 12], label [n]."""
    rows = [
        [random.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(number)
    ]  # seeded with `seed`
    columns = {
        "input_ids": rows,
        "attention_mask": [[1] * LENGTH] * number,
        "label": [int(row.count(1) > row.count(2)) for row in rows],
    }
    return Dataset.from_dict(columns).with_format("torch")


def sentence_loss(network: nn.Module, batch: Batch) -> Loss:
    found = network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = found.logits.float()
    return Loss(F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits), logits)
