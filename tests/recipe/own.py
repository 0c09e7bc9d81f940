"""Recipe files of one's own, and configs that name them."""

import textwrap
from dataclasses import replace

from launcher.config.schema import RecipeConfig, RecipesConfig
from tests.configs import composed

OWN_RECIPE = """
from torch import nn
from launcher.data.images.registry import load_images
from launcher.recipe import Config, Recipe, cross_entropy, model, model_builder, recipe

@model("perceptron")
def perceptron(num_pixels: int, num_classes: int, width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(num_pixels, width), nn.ReLU(), nn.Linear(width, num_classes)
    )

@recipe("pixels")
def pixels(config: Config) -> Recipe:
    images = load_images(config.data)
    num_pixels = images.channels * images.height * images.width
    return Recipe(
        build_model=model_builder(config, num_pixels=num_pixels, num_classes=len(images.classes)),
        train=images.train,
        validation=images.validation,
        loss=cross_entropy,
        train_transform=images.train_transform(config.data.augment),
        eval_transform=images.eval_transform(),
        classes=images.classes,
    )
"""


OWN_SCHEDULE = """
from launcher.recipe import recipe, schedule
@schedule("stairs")
def stairs(step, total):
    return 0.1 ** (3 * step // total)
"""


def config_of(uses="resnet", model="resnet18", path=None, **options):
    config = composed("data.batch_size=16", "data.augment.random_crop_padding=0", "precision=fp32")
    return replace(
        config,
        recipe=RecipeConfig("test", uses),
        model=replace(config.model, name=model, options=options),
        recipes=RecipesConfig(None if path is None else str(path)),
    )


def written(folder, text, name="mine.py"):
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return file
