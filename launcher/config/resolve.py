"""From the command line to the checked config of each job.

Owns the order of the checks: single overrides first, then unknown keys, then values. Reports all problems of
all jobs before any job starts. Never imports torch and creates no file.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from launcher.config import composition, recipe_file, validation
from launcher.config import messages as texts
from launcher.config import overrides as checks
from launcher.config.composition import Composer, Request, parsed
from launcher.config.constraints import value_problem
from launcher.config.groups import choice_values, recipes_dir
from launcher.config.optimizers import GROUPS, GROUPS_EXAMPLE
from launcher.config.other_keys import advice_for
from launcher.config.overrides import MOST_JOBS, value_of
from launcher.config.schema import Config, RecipeConfig, options_of, paths_of, value_at
from launcher.config.search_space import Interval, Space
from launcher.errors import ConfigError, first_line

# The tree of a job without its invalid overrides, its config, and what is wrong with it.
Composed = tuple[dict[str, object], Config | None, list[str]]
GRID = "grid"
NOT_GLOBAL = "A file of recipe/ or experiment/ sets all sections: its first line is `# @package _global_`."


def compose_jobs(request: Request) -> list[Config]:
    """The checked config of each job of the request, in Hydra's order; one for a single run.

    Of a search, whose jobs are not known yet, those that `Space.samples` has: the first job starts after each
    choice and each end of an interval has been checked. Raises one ConfigError with all problems of all jobs.
    `run.dir` is as the user gave it, or empty.
    """
    if request.config_dir is not None and not os.path.isdir(request.config_dir):
        raise ConfigError(f"--config-dir {request.config_dir}: there is no such directory.")
    composer = Composer(request)
    accepted, refused = accepted_overrides(request, composer)
    space = Space.of(accepted)
    first, *others = space.samples()
    jobs = [compose_job(first, composer, "recipe" in refused)]
    name = value_at(jobs[0][0], "sweep.name")
    if request.multirun and not refused and (problems := [*sweep_problems(space, name)]):
        raise ConfigError(texts.summary(problems))  # there may be a million jobs
    if name == GRID and space.size <= MOST_JOBS:
        others = space.grid()[1:]
    jobs += [compose_job(job, composer, "recipe" in refused) for job in others]
    return configs_of(jobs, [*itertools.chain(*refused.values())])


def compose_one(composer: Composer, overrides: tuple[str, ...]) -> Config:
    """The checked config of one job that a search has asked for. Raises ConfigError."""
    (config,) = configs_of([compose_job(overrides, composer)])
    return config


def configs_of(jobs: Sequence[Composed], problems: Sequence[str] = ()) -> list[Config]:
    """The configs of jobs. Raises one ConfigError with these problems and those of the jobs, each once."""
    if distinct := dict.fromkeys([*problems, *itertools.chain(*(of_job for _, _, of_job in jobs))]):
        raise ConfigError(texts.summary(list(distinct)))
    return [config for _, config, _ in jobs if config is not None]


def space_of(overrides: Sequence[str]) -> Space:
    """What the overrides of a checked request vary."""
    shared = ("hydra", "sweep")  # settings of the whole sweep, which are no jobs' own
    return Space.of(
        [each for each in map(parsed, overrides) if re.split("[./]", each.key_or_group)[0] not in shared]
    )


def sweep_problems(space: Space, name: object) -> Iterator[str]:
    """What makes a sweep of this name impossible, whatever its jobs are."""
    if name != GRID:
        if not space.dimensions:
            advice = "Give at least one key several values or an interval"
            example = "'optim.lr=tag(log, interval(1e-4, 1e-1))'"
            yield f"sweep={name}: nothing is searched. {advice}: {example}."
        return
    for each in space.dimensions:
        if isinstance(each, Interval):
            ends = f"{each.low:g},{each.high:g}"
            advice = "To draw from an interval: sweep=random or sweep=tpe."
            yield f"{each.key}=interval({ends}): a grid lists its values: {each.key}=a,b,c. {advice}"
    if MOST_JOBS < space.size < math.inf:
        yield checks.too_many_jobs(int(space.size))


def unreadable_problem(line: str, error: Exception) -> str:
    """The problem of an override that Hydra cannot parse, and how such a value is written."""
    key, has_value, value = line.partition("=")
    if not has_value:
        return f"{line}: has no value. An override is key=value."
    if value.startswith("(") and value.endswith(")"):  # a tuple of Python
        return f"{line}: a list is written in square brackets: '{key}=[{value[1:-1]}]'"
    escaped = value.replace('"', r"\"")
    quoted = shlex.quote(f'{key}="{escaped}"')
    advice = f"A text with characters such as = or ( is quoted, and the whole for the shell: {quoted}"
    return f"{line}: cannot be read as key=value ({first_line(error)}). {advice}"


def accepted_overrides(request: Request, composer: Composer) -> tuple[list[Override], dict[str, list[str]]]:
    """The well-formed overrides that name existing choices, and the problems of the others by key."""
    accepted: list[Override] = []
    refused: dict[str, list[str]] = {}
    for line in request.overrides:
        try:
            override = parsed(line)
            problems = override_problems(override, composer, request.multirun)
        except (HydraException, ValueError) as error:
            problems = [unreadable_problem(line, error)]
        if problems:
            refused.setdefault(line.partition("=")[0], []).extend(problems)
        else:
            accepted.append(override)
    return accepted, refused


def override_problems(override: Override, composer: Composer, multirun: bool) -> list[str]:
    if problem := checks.form_problem(override, multirun):
        return [problem]
    group, value = override.key_or_group, value_of(override)
    if group not in composer.groups:
        return []
    if override.is_interval_sweep():
        return [f"{override.input_line}: {group} takes names: {group}=a,b."]
    values = value if override.is_sweep_override() else [value]
    return [problem for choice in values if (problem := choice_problem(group, choice, composer))]


def choice_problem(group: str, choice: object, composer: Composer) -> str | None:
    if group != "recipe" or not recipe_file.is_recipe_file(choice):
        return checks.choice_problem(group, choice, composer.groups[group])
    try:
        recipe_file.recipe_of(str(choice))
    except ConfigError as error:
        return str(error)
    return None


def compose_job(overrides: tuple[str, ...], composer: Composer, recipe_refused: bool = False) -> Composed:
    """One job. `recipe_refused`: that no recipe is chosen is known already."""
    own_file = recipe_file.chosen_file(overrides)
    overrides = recipe_file.expanded(overrides)
    choices = tuple(line for line in overrides if line.partition("=")[0].lstrip("~") in composer.groups)
    known = composer.known(choices) | composer.groups.keys()  # not every group is also a key of the tree
    if own_file is not None:
        known |= {f"recipe.{name}" for name in recipe_file.recipe_of(own_file).defaults}
    kept, problems = [], list[str]()
    for override in map(parsed, overrides):
        if override.is_hydra_override():
            continue
        unknown = list(checks.unknown_keys(override.key_or_group, value_of(override), known))
        problems += [unknown_problem(key, value, choices, known, composer) for key, value in unknown]
        if not unknown:
            kept.append(override.input_line or "")
    tree = composer.resolved(tuple(kept))
    config, wrong = checked_tree(tree, composer.groups["recipe"], recipe_refused)
    return tree, config, [*problems, *wrong]


def checked_tree(
    tree: dict[str, object], recipes: Sequence[str], recipe_refused: bool
) -> tuple[Config | None, list[str]]:
    """The config of a tree, and what is wrong with its recipe, its paths and its values."""
    recipe = tree["recipe"]
    values = recipe if isinstance(recipe, Mapping) else {}
    if "experiment" in tree or any(isinstance(value, Mapping) for value in values.values()):
        return None, [NOT_GLOBAL]
    problems: list[str] = []
    if values and values["name"] is None and values["uses"] is None:
        tree = {**tree, "recipe": {"name": "unchosen", "uses": "unchosen"}}  # to find the other problems
        if not recipe_refused:
            choice = f"recipe=FILE.py of your own, or recipe=<name>: {', '.join(recipes)}"
            problems.append(f"recipe: none is chosen. Give {choice}.")
    else:
        problems += recipe_problems(values, value_at(tree, "recipes.path"))
    problems += composition.make_paths_absolute(tree)
    config, wrong = validation.checked(tree)
    return config, [*problems, *wrong]


def unknown_problem(
    key: str, value: object, choices: tuple[str, ...], known: Set[str], composer: Composer
) -> str:
    """The message for a key that the tree lacks: the choices that have it, or the nearest keys."""
    written = f"{key}={texts.show(value)}"
    if key.startswith(f"{GROUPS}."):
        return f"{written}: {GROUPS} is one list, set as a whole: {GROUPS_EXAMPLE}."
    group, _, inner = key.partition(".")
    directories = composer.request.directories
    values = {each: choice_values(directories, group, each) for each in composer.groups.get(group, ())}
    having = [f"{group}={choice}" for choice in values if inner in paths_of(values[choice])]
    if having:
        return f"{written}: this key belongs to {' and '.join(', '.join(having).rsplit(', ', 1))} only."
    if advice := advice_for(key, texts.show(value)):
        return f"{written}: there is no such key. {advice}"
    return texts.unknown_key(written, key, known)


def recipe_problems(recipe: Mapping[str, object], own: object) -> Iterator[str]:
    """A recipe that neither our files nor `own` offers, and options that its function does not take."""
    uses = recipe.get("uses")
    files = [*recipes_dir().glob("*.py"), *([Path(os.path.expanduser(own))] if isinstance(own, str) else [])]
    offered = recipe_file.offered(files)
    if offered is None or not isinstance(uses, str):
        return
    if uses not in offered:
        yield texts.unknown_name(f"recipe.uses={uses}", uses, sorted(offered))
    else:
        function = offered[uses]
        for name, value in options_of(recipe, RecipeConfig).items():
            if function.arguments is not None and name not in function.arguments:
                what = f"recipe.{name} (an option of {function.name})"
                yield texts.unknown_name(what, name, sorted(function.arguments))
            elif name in function.constraints and not function.constraints[name].is_valid(value):
                yield value_problem(f"recipe.{name}", value, function.constraints[name])
