"""A decoder-only transformer on plain text.

Radford et al.: Language Models are Unsupervised Multitask Learners, 2019 (GPT-2): norms before each part,
learned positions, GELU, the embedding's weights as those of the output, projections into the residual stream
that start smaller by the root of their number.

Loss on the held-out tenth of Shakespeare as characters, mean and standard deviation over 3 seeds: 2.3126
(0.0255) in fp32, 2.3181 (0.0221) in emulated fp16; two ranks on 2 cores of an AMD EPYC, torch 2.13.0,
2026-11-22:

    scripts/run recipe=gpt data.path=FILE model.layers=2 model.heads=2 model.width=64 data.block_size=64 \
        data.batch_size=16 optim.lr=3e-3 train.max_steps=500 train.eval_every_steps=null launch.nproc=2 seed=0
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.data import TextSet, load_text
from launcher.recipe import (
    Batch,
    Config,
    ConfigError,
    Loss,
    Perplexity,
    Recipe,
    class_loss,
    model,
    model_builder,
    recipe,
)

TEMPERATURE = 0.8  # of the text that is shown


@recipe("gpt")
def gpt(config: Config) -> Recipe:
    text = load_text(config.data)
    return Recipe(
        build_model=model_builder(config, vocab_size=text.vocabulary.size, context=text.block_size),
        train=text.train,
        validation=text.validation,
        loss=next_token_loss,
        metrics=[Perplexity()],
        monitor="perplexity",
        on_eval_end=functools.partial(sample, text) if text.sample_tokens else None,
    )


def next_token_loss(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Loss:
    """Summed cross-entropy of each token given those before it; counts tokens."""
    tokens = batch["tokens"].long()  # [n, block_size + 1]
    logits = network(tokens[:, :-1]).float()
    targets = tokens[:, 1:].flatten()
    return Loss(class_loss(logits.flatten(0, 1), targets, label_smoothing), targets.numel())


def sample(text: TextSet, network: nn.Module, index: Any) -> dict[str, str]:
    """A text that the model writes, beginning as the held-out part does."""
    first = text.validation.columns["tokens"][:1, :1].long()  # [1, 1]
    tokens = continued(network, first, text.block_size, text.sample_tokens)
    return {"sample": text.vocabulary.decode(tokens[0].tolist())}


def continued(network: nn.Module, tokens: Tensor, context: int, count: int) -> Tensor:
    """tokens [n, length] with `count` more, drawn from torch's generator: int64 [n, length + count]."""
    tokens = tokens.to(next(network.parameters()).device)
    for _ in range(count):
        logits = network(tokens[:, -context:])[:, -1].float()  # [n, vocab_size]
        drawn = torch.multinomial((logits / TEMPERATURE).softmax(dim=-1), 1)
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens


class Block(nn.Module):
    """Causal self-attention and two linear layers, each beside the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        hidden = F.gelu(self.widen(self.norm2(x)))
        return x + F.dropout(self.narrow(hidden), self.dropout, self.training)

    def attention(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.query_key_value(x).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [n, heads, length, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(n, length, width))
        return projected


class GPT(nn.Module):
    """tokens: int64 [n, length], length up to `context` -> logits: [n, length, vocab_size]"""

    def __init__(
        self, vocab_size: int, context: int, layers: int, heads: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        self.context = context
        self.dropout = dropout
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.token(tokens) + self.position(positions), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)

    def initialise(self) -> None:
        """Normal with a deviation of 0.02, of projections into the residual stream 0.02 / sqrt(2 layers)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_stream = name.endswith(("project", "narrow"))
                nn.init.normal_(
                    module.weight, std=0.02 / math.sqrt(2 * len(self.blocks) if into_stream else 1)
                )
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


@model("gpt")
def build(
    vocab_size: int, context: int, layers: int = 4, heads: int = 4, width: int = 128, dropout: float = 0.0
) -> GPT:
    if width % heads:
        raise ConfigError(f"model.width={width} does not divide by model.heads={heads}.")
    return GPT(vocab_size, context, layers, heads, width, dropout)
