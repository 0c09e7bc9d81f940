"""Recipes whose activations leave the range of fp16, as those of models that were trained in bf16 do.

Each is a tiny model of a kind that is known for it, on the same rows: 8 numbers, or their signs as tokens, to
4 classes. All train in fp32; in fp16 the loss is not finite from the first step on, whatever the loss scale,
or the gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from launcher.recipe import Config, Recipe, TensorData, cross_entropy, recipe

SAMPLES, FEATURES, CLASSES, WIDTH = 2048, 8, 4, 32


class RootMeanSquareNorm(nn.Module):
    """In fp32, as T5's and Gemma's are."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / inputs**0.5)
    return layer


class FeedForward(nn.Module):
    """The feed-forward layer of T5, with weights as large as those of its larger checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RootMeanSquareNorm()
        self.wi, self.wo = linear(WIDTH, 64, 300.0), linear(64, WIDTH, 1000.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wo(torch.relu(self.wi(self.norm(x))))
        return x + out


class Attention(nn.Module):
    """Among 8 parts of the row. The products of queries and keys are large, their temperature too."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = linear(4, 4, 300.0), linear(4, 4, 300.0), linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (8, 4))
        scores = self.query(parts) @ self.key(parts).transpose(-1, -2) / 1e5
        mixed: Tensor = scores.softmax(-1) @ self.value(parts)
        return x + mixed.flatten(-2)


class GatedUnit(nn.Module):
    """A gated linear unit in which some products are outliers, as in Llama's and Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = linear(WIDTH, 64, 300.0), linear(WIDTH, 64, 300.0)
        self.down = linear(64, WIDTH, 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return x + out


class Growing(nn.Module):
    """A layer that makes its input more than twice as large; no norm takes it back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(WIDTH, WIDTH, 2.8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.relu(self.inner(x))
        return out


class ScaledEmbedding(nn.Embedding):
    """Gemma's: the rows times the square root of the width, here of a wide model's."""

    def __init__(self) -> None:
        super().__init__(2, WIDTH)
        nn.init.normal_(self.weight, std=2000.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 2048**0.5


class OnRows(nn.Module):
    """[n, 8] numbers to [n, 4] logits."""

    def __init__(self, blocks: list[nn.Module], norm: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.first = linear(FEATURES, WIDTH)
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), norm, head

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out.float()


class OnTokens(nn.Module):
    """[n, 8] numbers, of which the signs count, to [n, 4] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = ScaledEmbedding(), RootMeanSquareNorm()
        self.blocks = nn.ModuleList([linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)])
        self.head = linear(FEATURES * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.tokens((x > 0).long()))
        for block in self.blocks:
            x = torch.relu(block(x))
        out: Tensor = self.head(x.flatten(1))
        return out.float()


def as_of_large_units(logits: Tensor) -> Tensor:
    """The same values with gradients 1,000 times as large, as of a loss measured in thousandths."""
    return logits + 999 * (logits - logits.detach())


class Shrunk(nn.Module):
    """Computes with small values, whose gradients are as large as the values are small."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x * 1e-4) * 1e4
        return out


class OnShrunk(OnRows):
    def forward(self, x: Tensor) -> Tensor:
        return as_of_large_units(super().forward(x))


class BetweenModules(nn.Module):
    """The same in the model's own code: it is no module's backward pass that leaves the range."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = linear(FEATURES, WIDTH), linear(WIDTH, WIDTH)
        self.head = linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.inner(self.first(x) * 1e-4) * 1e4))
        return as_of_large_units(out.float())


# They fail on the way back: the loss is finite, and the gradient is not at any loss scale.
BACKWARD_MODELS = {
    "shrunk": lambda: OnShrunk([Shrunk(), Shrunk()], RootMeanSquareNorm(), linear(WIDTH, CLASSES)),
    "between_modules": BetweenModules,
}
MODELS = {
    "feed_forward": lambda: OnRows(
        [FeedForward(), FeedForward()], RootMeanSquareNorm(), linear(WIDTH, CLASSES)
    ),
    "embeddings": OnTokens,
    "attention": lambda: OnRows([Attention(), Attention()], RootMeanSquareNorm(), linear(WIDTH, CLASSES)),
    "gated_unit": lambda: OnRows([GatedUnit(), GatedUnit()], RootMeanSquareNorm(), linear(WIDTH, CLASSES)),
    "no_norm": lambda: OnRows([Growing() for _ in range(12)], nn.Identity(), linear(WIDTH, CLASSES, 1e-5)),
}


def rows() -> TensorData:
    """Two of five labels are drawn anew, so that a good loss is about 1.0, and more precision no better."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    label = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    wrong = torch.rand(SAMPLES, generator=generator) < 0.4
    label = torch.where(wrong, torch.randint(CLASSES, (SAMPLES,), generator=generator), label)
    return TensorData({"x": x, "label": label})


def recipe_of(name: str) -> Recipe:
    def build() -> nn.Module:
        torch.manual_seed(5)
        return {**MODELS, **BACKWARD_MODELS}[name]()

    return Recipe(
        build_model=build,
        train=rows(),
        validation=rows(),
        loss=lambda network, batch: cross_entropy(network, batch, inputs="x"),
        classes=tuple("abcd"),
    )


@recipe("feed_forward")
def feed_forward(config: Config) -> Recipe:
    return recipe_of("feed_forward")


@recipe("embeddings")
def embeddings(config: Config) -> Recipe:
    return recipe_of("embeddings")


@recipe("attention")
def attention(config: Config) -> Recipe:
    return recipe_of("attention")


@recipe("gated_unit")
def gated_unit(config: Config) -> Recipe:
    return recipe_of("gated_unit")


@recipe("no_norm")
def no_norm(config: Config) -> Recipe:
    return recipe_of("no_norm")


@recipe("shrunk")
def shrunk(config: Config) -> Recipe:
    return recipe_of("shrunk")


@recipe("between_modules")
def between_modules(config: Config) -> Recipe:
    return recipe_of("between_modules")


class Steep(nn.Module):
    """Large values times small weights: the gradient of the weights is as large as the values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(FEATURES, CLASSES, 1e-7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.float() * 1e7)
        return out.float()


@recipe("steep")
def steep(config: Config) -> Recipe:
    return replace(recipe_of("feed_forward"), build_model=Steep)


@recipe("bad_rows")
def bad_rows(config: Config) -> Recipe:
    """No module is at fault: the rows are not finite."""
    whole = recipe_of("feed_forward")
    assert isinstance(whole.train, TensorData)
    bad = TensorData({**whole.train.columns, "x": whole.train.columns["x"] / 0.0})
    return replace(whole, train=bad)
