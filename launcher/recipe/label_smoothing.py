"""train.label_smoothing: how a recipe's loss is given it, in training alone.

A loss takes part by an argument `label_smoothing`; an evaluation measures the loss without it.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from dataclasses import replace

from torch import nn

from launcher.config.schema import Config
from launcher.data.tensors import Batch
from launcher.errors import ConfigError
from launcher.recipe.contract import Loss, Recipe


def with_label_smoothing(recipe: Recipe, config: Config) -> Recipe:
    """The recipe with the smoothing that the config asks for. Raises ConfigError for a loss without it."""
    smoothing = config.train.label_smoothing
    if not smoothing:
        return recipe
    _require_argument(recipe, smoothing)
    plain = recipe.loss

    @functools.wraps(plain)
    def loss(network: nn.Module, batch: Batch) -> Loss:
        if not network.training:
            return plain(network, batch)
        return plain(network, batch, label_smoothing=smoothing)  # type: ignore[call-arg]  # checked above

    return replace(recipe, loss=loss)


def _require_argument(recipe: Recipe, smoothing: float) -> None:
    named = False
    with suppress(TypeError, ValueError):  # of C, without a signature
        named = "label_smoothing" in inspect.signature(recipe.loss).parameters
    if not named:
        title = getattr(recipe.loss, "__qualname__", type(recipe.loss).__name__)
        raise ConfigError(
            f"train.label_smoothing={smoothing:g}: the recipe's loss, {title}, has no argument "
            "label_smoothing, so this would change nothing. Give it one, passed to "
            "launcher.recipe.class_loss, or use launcher.recipe.cross_entropy."
        )
