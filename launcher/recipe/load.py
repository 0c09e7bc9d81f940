"""Builds what the config names: its recipe with the data, its model and its schedule."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

from launcher.config.messages import unknown_name
from launcher.config.rules import SCHEDULES
from launcher.config.schema import Config
from launcher.engine import ParameterGroup
from launcher.errors import ConfigError
from launcher.recipe.checks import (
    refuse_other_arguments,
    refuse_unusable_data,
    refuse_unusable_metrics,
    without_empty_sets,
)
from launcher.recipe.contract import ModelBuilder, Recipe, Schedule
from launcher.recipe.registry import Registry, look_up, registry_of, unmarked
from launcher.recipe.training_aids import with_training_aids


def load_recipe(config: Config) -> Recipe:
    """The recipe that the config asks for, with its data loaded. ConfigError for an unknown name."""
    registry = registry_of(config.recipes.path)
    uses = config.recipe.uses
    if uses not in registry.recipes and (advice := unmarked(config.recipes.path, uses)):
        raise ConfigError(f"recipe.uses={uses}: {advice}")
    build = look_up("recipe.uses", uses, registry.recipes)
    refuse_other_arguments(f'the function under @recipe("{uses}")', build, "(config)")
    named = schedule_named(config.schedule.name, registry)
    built = build(config)
    if not isinstance(built, Recipe):
        raise ConfigError(
            f'the function under @recipe("{uses}") returned {type(built).__name__}. '
            f"It has to return a launcher.recipe.Recipe."
        )
    if config.data.val_fraction == 0:
        built = without_empty_sets(built)
    refuse_unusable_metrics(built)
    refuse_unusable_data(built, may_lack=config.data.val_fraction == 0)
    if built.schedule is not None and not callable(built.schedule):
        raise ConfigError(
            f"the recipe's schedule={built.schedule!r}: it must be a function of (step, total), or None. "
            "The name of a schedule belongs into the config: schedule.name."
        )
    if not isinstance(built.groups, list | tuple) or not all(
        isinstance(group, ParameterGroup) for group in built.groups
    ):
        raise ConfigError(
            f"Recipe.groups={built.groups!r}: it must be a list of ParameterGroup, for example "
            '[ParameterGroup("*.bias", weight_decay=0.0)].'
        )
    built = with_training_aids(built, config)
    return built if named is None else replace(built, schedule=named)


def schedule_named(name: str, registry: Registry) -> Schedule | None:
    """The registered schedule; None for those of the launcher. ConfigError for an unknown name."""
    if name in SCHEDULES:
        return None
    return look_up("schedule.name", name, {**dict.fromkeys(SCHEDULES), **registry.schedules})


def model_builder(config: Config, **facts: Any) -> ModelBuilder:
    """A function that builds the config's model from its options and the facts given by the recipe.

    Facts are what the data dictates (num_classes, ...). ConfigError for an unknown model or option.
    """
    build = look_up("model.name", config.model.name, registry_of(config.recipes.path).models)
    options = [name for name in inspect.signature(build).parameters if name not in facts]
    for name in config.model.options:
        if name not in options:
            raise ConfigError(
                unknown_name(f"model.{name} (an option of {config.model.name})", name, sorted(options))
            )
    return ModelBuilder(config.model.name, functools.partial(build, **facts, **config.model.options))
