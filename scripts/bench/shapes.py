"""Parameter shapes of the models that the update is measured on, by name."""

from __future__ import annotations

import torch

Shapes = dict[str, torch.Size]


def resnet50_shapes() -> Shapes:
    """ImageNet's ResNet-50: a 7x7 stem, 3 + 4 + 6 + 3 bottleneck blocks, 1000 classes."""
    shapes = convolution("conv1", "bn1", 64, 3, 7)
    channels = 64
    for stage, (depth, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), 1):
        for block in range(depth):
            name = f"layer{stage}.{block}"
            shapes |= convolution(f"{name}.conv1", f"{name}.bn1", width, channels, 1)
            shapes |= convolution(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            shapes |= convolution(f"{name}.conv3", f"{name}.bn3", 4 * width, width, 1)
            if block == 0:
                shapes |= convolution(f"{name}.downsample.0", f"{name}.downsample.1", 4 * width, channels, 1)
            channels = 4 * width
    return shapes | linear("fc", 1000, channels)


def bert_base_shapes() -> Shapes:
    return bert_shapes(12, 768)


def bert_shapes(layers: int, width: int) -> Shapes:
    """BERT, uncased: three embeddings, so many layers of this width, and the pooler. Base: 12 and 768."""
    inner = 4 * width
    shapes = {
        f"embeddings.{name}.weight": torch.Size((rows, width))
        for name, rows in (("word", 30522), ("position", 512), ("token_type", 2))
    }
    shapes |= norm("embeddings.norm", width)
    for layer in range(layers):
        name = f"encoder.{layer}"
        for part in ("query", "key", "value", "attention_output"):
            shapes |= linear(f"{name}.{part}", width, width)
        shapes |= norm(f"{name}.attention_norm", width)
        shapes |= linear(f"{name}.intermediate", inner, width) | linear(f"{name}.output", width, inner)
        shapes |= norm(f"{name}.output_norm", width)
    return shapes | linear("pooler", width, width)


def gpt_shapes(layers: int, width: int) -> Shapes:
    """Layers of GPT-2 and GPT-3, 50257 tokens, 2048 positions, and the output tied to the input."""
    shapes = {
        "tokens.weight": torch.Size((50257, width)),
        "positions.weight": torch.Size((2048, width)),
    }
    for layer in range(layers):
        name = f"layer{layer}"
        shapes |= norm(f"{name}.attention_norm", width) | norm(f"{name}.inner_norm", width)
        shapes |= linear(f"{name}.attention", 3 * width, width)
        shapes |= linear(f"{name}.attention_output", width, width)
        shapes |= linear(f"{name}.inner", 4 * width, width) | linear(f"{name}.output", width, 4 * width)
    return shapes | norm("norm", width)


def tiny_shapes() -> Shapes:
    """A tiny model, to test the benchmark."""
    return convolution("conv", "bn", 40, 30, 3) | linear("fc", 200, 90)


def convolution(name: str, norm_name: str, out: int, channels: int, kernel: int) -> Shapes:
    return {f"{name}.weight": torch.Size((out, channels, kernel, kernel))} | norm(norm_name, out)


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": torch.Size((width,)), f"{name}.bias": torch.Size((width,))}


def linear(name: str, out: int, width: int) -> Shapes:
    return {f"{name}.weight": torch.Size((out, width)), f"{name}.bias": torch.Size((out,))}
