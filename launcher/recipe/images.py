"""The parts of a recipe that follow from a set of images."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from launcher.config.schema import Config
from launcher.data.images.catalog import ImageSet
from launcher.recipe.contract import Recipe, cross_entropy


def image_recipe(config: Config, images: ImageSet, build_model: Callable[[], nn.Module]) -> Recipe:
    """Classification of the images, augmented and normalised on the device, by summed cross-entropy.

    The model takes float [n, channels, height, width] and returns logits [n, classes].
    """
    return Recipe(
        build_model=build_model,
        train=images.train,
        validation=images.validation,
        loss=cross_entropy,
        train_transform=images.train_transform(config.data.augment),
        eval_transform=images.eval_transform(),
        classes=images.classes,
    )
