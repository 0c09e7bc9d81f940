"""Classification of one or two sentences by an encoder of `transformers`.

Either any that the package knows, by folder or by name, or a small BERT from scratch (Devlin et al., 2019,
arXiv:1810.04805) with a tokenizer that is fitted to the training text.

Accuracy of the small BERT on the held-out pairs of MED after 8 epochs (majority class: 51.6 %), mean and
standard deviation over 5 seeds, which start from other random weights: 68.96 % (3.36) in fp32, 70.19 % (3.95)
in emulated fp16; two ranks on 2 cores of an AMD EPYC, torch 2.13.0, 2026-11-22:

    scripts/run recipe=bert data.path=DIR data.max_seq_len=64 train.epochs=8 launch.nproc=2 seed=0
"""

from __future__ import annotations

from torch import nn

from launcher.data import load_sentences, pretrained_encoder
from launcher.recipe import (
    Batch,
    Config,
    Loss,
    Recipe,
    class_loss,
    model,
    model_builder,
    recipe,
)


@recipe("bert")
def bert(config: Config) -> Recipe:
    path = config.model.options.get("path")
    encoder = pretrained_encoder(path) if path is not None else None
    sentences = load_sentences(config.data, encoder.tokenizer(config.data) if encoder else None)
    return Recipe(
        build_model=model_builder(
            config,
            num_classes=len(sentences.classes),
            vocab_size=sentences.vocab_size,
            max_seq_len=sentences.max_seq_len,
            pad=sentences.pad,
        ),
        train=sentences.train,
        validation=sentences.validation_sets,
        loss=sentence_loss,
        collate=sentences.train.collate,
        lengths=sentences.train.lengths,
        classes=sentences.classes,
    )


def sentence_loss(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Loss:
    """Summed cross-entropy of the classes of the sentences."""
    inputs = {name: column for name, column in batch.items() if name != "label"}
    logits = network(**inputs).logits.float()
    loss_sum = class_loss(logits, batch["label"], label_smoothing)
    return Loss(loss_sum, len(logits), logits.detach())


@model("bert")
def build(
    num_classes: int,
    vocab_size: int,
    max_seq_len: int,
    pad: int,
    path: str | None = None,
    layers: int = 2,
    heads: int = 2,
    width: int = 128,
    dropout: float = 0.1,
) -> nn.Module:
    if path is not None:
        return pretrained_encoder(path).classifier(num_classes)
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            max_position_embeddings=max_seq_len,
            pad_token_id=pad,
            num_labels=num_classes,
        )
    )
