"""BERT-base and GPT of 124 M parameters in plain torch, for benchmarks: no pretrained weights, no tokenizer.

Shapes and operations are those of the originals: Devlin et al. 2018 (post-norm), Radford et al. 2019
(pre-norm). Dropout is left out on both sides of every comparison.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """One layer: attention over all tokens, or over earlier ones, then two linear layers."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        # x: [batch, tokens, width]
        if self.causal:
            x = x + self.attend(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Transformer(nn.Module):
    """tokens [batch, tokens] -> logits [batch, 2] of the first token, or [batch * tokens, vocabulary]."""

    def __init__(
        self, vocabulary: int, positions: int, width: int, heads: int, layers: int, causal: bool
    ) -> None:
        super().__init__()
        self.causal = causal
        self.word, self.position = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        if not causal:
            self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word(tokens) + self.position(places)
        if self.causal:
            return F.linear(self.norm(self.blocks(x)), self.word.weight).flatten(0, 1)
        return self.head(torch.tanh(self.pooler(self.blocks(self.norm(x))[:, 0])))


def bert_base() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(30522, 512, 768, 12, 12, causal=False)


def gpt_small() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(50257, 1024, 768, 12, 12, causal=True)


def tiny_transformer(causal: bool) -> Callable[[], nn.Module]:
    """A tiny model with 100 tokens, to test the benchmark."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Transformer(100, 16, 16, 2, 1, causal)

    return build
