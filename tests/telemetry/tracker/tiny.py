"""A recipe file of one's own, and its entry of a config tree, for whole runs with trackers."""

RECIPE = """
import torch
from torch import nn
from launcher.recipe import Config, Recipe, TensorData, cross_entropy, recipe

@recipe("tiny")
def tiny(config: Config) -> Recipe:
    x = torch.randn(64, 2)
    label = (x[:, 0] > 0).long()
    data = TensorData({"image": x, "label": label})
    return Recipe(lambda: nn.Linear(2, 2), data, data, cross_entropy, classes=("a", "b"))
"""
YAML = "# @package _global_\nrecipe: {name: tiny, uses: tiny}\n"
