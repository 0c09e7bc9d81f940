"""What a recipe imports: the contract, the decorators, and what batches and metrics are made of."""

from launcher.config.schema import Config
from launcher.data.reader import columns
from launcher.data.tensors import Batch, TensorData
from launcher.engine import ParameterGroup
from launcher.errors import ConfigError, DataError
from launcher.metrics import Classification, LossMetric, Metric, Perplexity
from launcher.recipe.contract import Loss, Recipe, class_loss, cross_entropy
from launcher.recipe.rank0 import rank0_first
from launcher.recipe.registry import (
    load_recipe,
    model,
    model_builder,
    optimizer,
    recipe,
    registry_of,
    schedule,
)

__all__ = [
    "Batch",
    "Classification",
    "Config",
    "ConfigError",
    "DataError",
    "Loss",
    "LossMetric",
    "Metric",
    "ParameterGroup",
    "Perplexity",
    "Recipe",
    "TensorData",
    "class_loss",
    "columns",
    "cross_entropy",
    "load_recipe",
    "model",
    "model_builder",
    "optimizer",
    "rank0_first",
    "recipe",
    "registry_of",
    "schedule",
]
