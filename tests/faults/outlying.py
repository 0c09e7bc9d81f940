"""A recipe with one sample far beyond the others, which comes once in each epoch."""

from __future__ import annotations

import torch
from torch import nn

from launcher.recipe import Config, Recipe, TensorData, cross_entropy, recipe

SAMPLES, FEATURES, CLASSES = 256, 6, 3


@recipe("outlying")
def outlying(config: Config) -> Recipe:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    classes = x[:, :CLASSES].argmax(1)
    far = [101]
    x[far] *= 100
    classes[far] = x[far, :CLASSES].argmin(1)  # labelled wrong
    data = TensorData({"x": x, "label": classes})
    return Recipe(
        build_model=lambda: nn.Linear(FEATURES, CLASSES),
        train=data,
        validation=data,
        loss=lambda network, batch, label_smoothing=0.0: cross_entropy(network, batch, inputs="x"),
        classes=[str(number) for number in range(CLASSES)],
    )
