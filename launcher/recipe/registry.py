"""Finds recipes, models, schedules and optimizers by name, and builds the recipe that a config names.

Owns the decorators that offer them and the loading of recipe files: those of the project and the user's own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from launcher.config.constraints import SCHEDULES
from launcher.config.groups import recipes_dir
from launcher.config.messages import unknown_name
from launcher.config.optimizers import OPTIMIZERS
from launcher.config.schema import Config
from launcher.errors import ConfigError, LauncherError, described
from launcher.recipe.checks import checked
from launcher.recipe.contract import ModelBuilder, Recipe, Schedule, with_label_smoothing
from launcher.user_code import short_traceback

Function = TypeVar("Function", bound=Callable[..., object])
Value = TypeVar("Value")
REGISTERED = "launcher_registered"  # the attribute that a decorator sets on a function
TOP_LEVEL = (
    'A function of your own is found if the line above it marks it, as @recipe("name") marks a recipe, and a '
    "name at the top level of its file refers to it: give such a name to one that is made in a function."
)


@dataclass(frozen=True)
class Registry:
    """The functions that recipe files offer, by name."""

    recipes: Mapping[str, Callable[[Config], Recipe]]
    models: Mapping[str, Callable[..., nn.Module]]
    schedules: Mapping[str, Schedule]
    optimizers: Mapping[str, Callable[..., object]]  # classes of torch.optim.Optimizer


def recipe(name: str = "") -> Callable[[Function], Function]:
    """Offers `f(config: Config, width: int = 64, ...) -> Recipe` under `name`, or under the function's name.

    The arguments after `config`, which have defaults, are keys of the config: recipe.width=128.
    """
    return _mark("recipe", name)


def model(name: str = "") -> Callable[[Function], Function]:
    """Offers a function that builds a model under `name` (the config's `model.name`).

    Its keyword arguments that the recipe does not give itself are the model's options in the config.
    """
    return _mark("model", name)


def schedule(name: str = "") -> Callable[[Function], Function]:
    """Offers a schedule of the learning rate under `name` (the config's `schedule.name`).

    `f(step: int, total: int) -> float` gives the factor on optim.lr of each applied step, 0 to total - 1: a
    finite number of at least 0, the same on all ranks. Skipped steps are not counted. The function decides on
    the whole course: schedule.warmup_fraction is not applied to it.
    """
    return _mark("schedule", name)


def optimizer(name: str = "") -> Callable[[Function], Function]:
    """Offers a class of `torch.optim.Optimizer` under `name` (the config's `optim.name`).

    For one of torch write `class Mine(torch.optim.Adamax): pass` below it. It updates the fp32 masters; what
    its constructor takes besides `params` and `lr` are its options in the config.
    """
    return _mark("optimizer", name)


def registry_of(user_path: str | None) -> Registry:
    """All recipes and models, the project's and the user's. ConfigError for a name given twice."""
    files = sorted(path for path in recipes_dir().glob("*.py") if not path.name.startswith("_"))
    if user_path is not None:
        files.append(_user_file(user_path))
    known = {"schedule": SCHEDULES, "optimizer": OPTIMIZERS}
    found: dict[str, dict[str, Any]] = {"recipe": {}, "model": {}, "schedule": {}, "optimizer": {}}
    for file in files:
        for kind, name, function in _registered_in(_load(file)):
            if name in found[kind]:
                first = sys.modules[found[kind][name].__module__].__file__
                raise ConfigError(f'@{kind}("{name}") is given twice: in {first} and in {file}. Rename one.')
            if kind in known and name in known[kind]:
                raise ConfigError(
                    f'@{kind}("{name}"): that {kind} is one of the launcher. Choose another name.'
                )
            found[kind][name] = function
    return Registry(found["recipe"], found["model"], found["schedule"], found["optimizer"])


def _mark(kind: str, name: str) -> Callable[[Function], Function]:
    def mark(function: Function) -> Function:
        given = name if isinstance(name, str) and name else function.__name__
        setattr(function, REGISTERED, (*vars(function).get(REGISTERED, ()), (kind, given)))
        return function

    return mark(name) if callable(name) else mark  # without parentheses it is given the function


def _registered_in(module: ModuleType) -> list[tuple[str, str, Callable[..., object]]]:
    """(kind, name, function) of what the file itself defines, not of what it imports from another."""
    functions = {id(value): value for value in vars(module).values() if callable(value)}.values()
    return [
        (kind, name, function)
        for function in functions
        if getattr(function, "__module__", None) == module.__name__
        for kind, name in getattr(function, "__dict__", {}).get(REGISTERED, ())  # not that of a base class
    ]


def _user_file(user_path: str) -> Path:
    path = Path(os.path.expanduser(user_path))
    if not path.is_file() or path.suffix != ".py":
        kind = "is a folder" if path.is_dir() else "is not a .py file" if path.exists() else "does not exist"
        raise ConfigError(f"recipes.path={user_path} {kind}. Give the Python file that holds your @recipe.")
    return path


def _load(file: Path) -> ModuleType:
    """Runs a recipe file once per process and version of its text; errors name the file."""
    source = file.read_bytes()
    digest = hashlib.sha256(str(file.resolve()).encode() + b"\0" + source).hexdigest()[:12]
    name = f"launcher_recipe_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if file.parent != recipes_dir() and (beside := str(file.resolve().parent)) not in sys.path:
        sys.path.append(beside)  # for imports of files beside it, also later and in loader processes
    sys.modules[name] = module  # dataclasses and torch.compile look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except LauncherError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:  # a user's file may fail in any way
        del sys.modules[name]
        failure = ConfigError(f"recipe file {file} cannot be loaded: {_where(error, file)}.")
        if not isinstance(error, SyntaxError):  # whose line the text has
            failure.traceback = short_traceback(error)
        raise failure from error
    return module


def _where(error: BaseException, file: Path) -> str:
    """`line 3: NameError: ...`, the innermost line of `file` that the error passed through."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"line {line}: {described(error)}" if line else described(error)


def look_up(key: str, name: str, known: Mapping[str, Value]) -> Value:
    if name not in known:
        raise ConfigError(f"{unknown_name(f'{key}={name}', name, sorted(known))} {TOP_LEVEL}")
    return known[name]


def load_recipe(config: Config) -> Recipe:
    """The recipe that the config asks for, with its data loaded. ConfigError for an unknown name."""
    registry = registry_of(config.recipes.path)
    uses = config.recipe.uses
    build = look_up("recipe.uses", uses, registry.recipes)
    schedules = {**dict.fromkeys(SCHEDULES), **registry.schedules}  # None of those of the launcher
    named = look_up("schedule.name", config.schedule.name, schedules)
    first = next(iter(inspect.signature(build).parameters), "config")  # the config itself is no option
    refuse_unknown_options(f"recipe.{{}} (an option of {uses})", config.recipe.options, build, first)
    built = build(config, **config.recipe.options)
    if not isinstance(built, Recipe):
        raise ConfigError(
            f'the function under @recipe("{uses}") returned {type(built).__name__}. '
            "It has to return a launcher.recipe.Recipe."
        )
    built = checked(built, may_lack=config.data.val_fraction == 0)
    built = replace(built, loss=with_label_smoothing(built.loss, config.train.label_smoothing))
    return built if named is None else replace(built, schedule=named)


def model_builder(config: Config, **facts: object) -> ModelBuilder:
    """A function that builds the config's model from its options and the facts given by the recipe.

    Facts are what the data dictates (num_classes, ...). ConfigError for an unknown model or option.
    """
    if config.model.name is None:
        raise ConfigError(
            "model=null: this recipe builds the model of the config. Choose one: model=resnet18"
        )
    build = look_up("model.name", config.model.name, registry_of(config.recipes.path).models)
    refuse_unknown_options(
        f"model.{{}} (an option of {config.model.name})", config.model.options, build, *facts
    )
    return ModelBuilder(config.model.name, functools.partial(build, **facts, **config.model.options))


def refuse_unknown_options(
    what: str, options: Mapping[str, object], build: Callable[..., object], *facts: str
) -> None:
    """Raise ConfigError for an option that the function does not take from the config."""
    known = [name for name in inspect.signature(build).parameters if name not in facts]
    for name in options:
        if name not in known:
            raise ConfigError(unknown_name(what.format(name), name, sorted(known)))
