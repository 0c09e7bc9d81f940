"""How far a sampler's log-probabilities are from the trainer's, with the same weights: in bf16 and in fp16.

    python scripts/bench/rl_mismatch.py [--quick] [--json FILE]

In reinforcement learning an inference engine samples and a trainer computes the log-probabilities of the same
tokens again; even at the first update their ratio is not 1, because they round at other places (Qi et al.,
2025, arXiv:2510.26788). Here both run the GPT of recipes/gpt.py under the engine's precision context: the
sampler decodes token by token with cached keys and values and an attention written out, whose probabilities
are rounded to half; the trainer runs whole sequences through torch's attention. Weights are random, the same
fp32 values for both precisions, with logits of a standard deviation of about 3; bf16 and fp16 sample unlike
tokens. Reports the mean and the largest |log ratio| over all tokens, of each seed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.engine import SGD, Policy, Stepper
from recipes.gpt import GPT, Block
from scripts.bench.interleaved import write

SIZES = {"4 x 128": (4, 4, 128), "8 x 256": (8, 8, 256), "12 x 512": (12, 8, 512)}  # layers, heads, width
VOCABULARY, SEQUENCES, LENGTH, SEEDS = 1024, 32, 64, 3
PRECISIONS = ("bf16", "fp16")


def network(size: str, seed: int) -> GPT:
    layers, heads, width = SIZES[size]
    torch.manual_seed(seed)
    model = GPT(VOCABULARY, LENGTH + 1, layers, heads, width, dropout=0.0)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            depth = 2 * layers if name.endswith(("project", "narrow")) else 1
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features * depth))
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=3 / math.sqrt(width))
    return model


class CachedBlock:
    """A block that is given one token of each sequence at a time."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:  # [n, 1, width] to the same
        block = self.block
        parts = block.query_key_value(block.norm1(x)).unflatten(-1, (3, block.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [n, heads, 1, width / heads]
        self.keys.append(key)
        self.values.append(value)
        keys, values = torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)
        scores = query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
        mixed = scores.float().softmax(-1).to(values.dtype) @ values
        x = x + block.project(mixed.transpose(1, 2).flatten(2))
        return x + block.narrow(F.gelu(block.widen(block.norm2(x))))


def decode(model: GPT, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """tokens [n, LENGTH + 1], and the log-probabilities with which all but the first were drawn."""
    blocks = [CachedBlock(block) for block in model.blocks]  # type: ignore[arg-type]
    tokens, log_probs = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator), []
    for position in range(LENGTH):
        x = model.token(tokens[:, -1:]) + model.position(torch.tensor([position]))
        for block in blocks:
            x = block(x)
        logits = F.linear(model.norm(x), model.token.weight)[:, -1].float()
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        log_probs.append(logits.log_softmax(-1).gather(-1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens, torch.cat(log_probs, dim=1)


@torch.no_grad()
def log_ratios(size: str, precision: str, seed: int) -> Tensor:
    """|log ratio| of trainer and sampler for each token: [n, LENGTH]."""
    model = network(size, seed)
    stepper = Stepper(model, SGD(lr=0.1), Policy.named(precision), emulate=True)
    with stepper.forward():
        tokens, sampled = decode(model, torch.Generator().manual_seed(seed))
        logits = model(tokens[:, :-1]).float()
    trained = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return (trained - sampled).abs()


def rows(sizes: list[str], seeds: int) -> Iterator[dict[str, object]]:
    for size in sizes:
        parameters = sum(p.numel() for p in network(size, 0).parameters())
        for precision in PRECISIONS:
            found = [log_ratios(size, precision, seed) for seed in range(seeds)]
            yield {
                "size": size,
                "parameters": parameters,
                "precision": precision,
                "mean": [float(each.mean()) for each in found],
                "largest": [float(each.max()) for each in found],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest size, one seed")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    sizes, seeds = ([*SIZES][:1], 1) if words.quick else ([*SIZES], SEEDS)
    found = []
    for row in rows(sizes, seeds):
        found.append(row)
        mean, largest = (", ".join(f"{value:.2g}" for value in row[key]) for key in ("mean", "largest"))  # type: ignore[attr-defined]
        print(f"{row['size']:10} {row['precision']:5} mean {mean}; largest {largest}", flush=True)
    what = "|log ratio| of sampler and trainer at the first update, emulated half arithmetic"
    write(words.json, what, seeds, found, tokens_per_seed=SEQUENCES * LENGTH)


if __name__ == "__main__":
    main()
