"""From the command line to the checked config of each job.

Owns the order of the checks: single overrides first, then unknown keys, then values. Reports all problems of
all jobs before any job starts. Owns also what an experiment adds, a YAML file in conf/experiment: it may list
the values of a sweep in its section `sweep`, which become the overrides that a user would have typed; what
else it sets is ordinary config, composed last. Never imports torch and creates no file.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from launcher.config import composition, recipe_file, validation
from launcher.config import messages as texts
from launcher.config import overrides as checks
from launcher.config.composition import Composer, Request
from launcher.config.groups import choice_file, choice_values, group_choices, recipes_dir
from launcher.config.optimizers import GROUPS, GROUPS_EXAMPLE, OPTIMIZERS
from launcher.config.other_programs import advice_for
from launcher.config.overrides import MOST_JOBS, value_of
from launcher.config.recipe_file import RecipeFunction
from launcher.config.rules import SCHEDULES, TRACKERS, one_of, value_problem
from launcher.config.schema import Config, SweepConfig, rules, types_of
from launcher.config.search_space import Dimension, Interval, Space
from launcher.config.trees import paths_of, value_at
from launcher.errors import ConfigError, first_line

Composed = tuple[dict[str, object], list[str]]  # the tree of a job, and its problems
EXPERIMENT = "experiment"
GRID = "grid"
REGISTERED: Mapping[str, tuple[str, Sequence[str]]] = {  # the decorator, and the names that are built in
    "schedule.name": ("schedule", SCHEDULES),
    "optim.name": ("optimizer", tuple(OPTIMIZERS)),
    "tracker.name": ("tracker", TRACKERS),
}


def with_experiment(request: Request) -> Request:
    """The request expanded to the sweep of its experiment, if that has one; globs become names.

    A key given by the user keeps the user's values.
    """
    request = without_globs(request)
    name = chosen(request.overrides)
    if name is None or name not in group_choices(*request.directories).get(EXPERIMENT, ()):
        return request  # an unknown name is reported together with all other problems
    values = choice_values(request.directories, EXPERIMENT, name)
    if "sweep" not in values:
        return request
    sweep = values["sweep"]
    if isinstance(sweep, Mapping):  # the settings of the sweep are ordinary config
        settings = types_of(SweepConfig)
        if sweep and sweep.keys() <= settings.keys():
            return request
        sweep = {key: listed for key, listed in sweep.items() if key not in settings}
    if not isinstance(sweep, Mapping) or not sweep:
        file = choice_file(request.directories, EXPERIMENT, name)
        raise ConfigError(f"{file}: has a `sweep:` section that is no list of values for each key.")
    given = {line.partition("=")[0] for line in request.overrides}
    added = [line for key, line in sweep_overrides(name, sweep) if key not in given]
    return replace(request, overrides=(*request.overrides, *added), multirun=True)


def without_globs(request: Request) -> Request:
    """The request with the names that match in place of a glob; unchanged without one."""
    if not any("glob(" in line for line in request.overrides):
        return request
    groups, lines = group_choices(*request.directories), list(request.overrides)
    for number, line in enumerate(lines):
        with suppress(HydraException, ValueError, RecursionError):  # reported with other problems
            override = OverridesParser.create().parse_override(line)
            value, group = override.value(), override.key_or_group
            if isinstance(value, Glob) and (names := value.filter(groups.get(group, []))):
                lines[number] = f"{group}={','.join(names)}"
    return replace(request, overrides=tuple(lines))


def chosen(overrides: Sequence[str]) -> str | None:
    """The name in the last `experiment=<name>`, None without one or with null."""
    names = [line.partition("=")[2] for line in overrides if line.startswith(f"{EXPERIMENT}=")]
    return names[-1] if names and names[-1] != "null" else None


def sweep_overrides(name: str, sweep: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Key and override line of each swept key; a key with one value is swept as well."""
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            shown = texts.show(values)
            raise ConfigError(f"{EXPERIMENT}={name}: `sweep.{key}` is {shown}; it must be a list of values.")
        yield key, f"{key}={','.join(map(texts.literal, values))}"


def compose_jobs(request: Request) -> list[Config]:
    """The checked config of each job of the request, in Hydra's order; one for a single run.

    Of a search, whose jobs are not known yet, those that `Space.samples` has: the first job starts after each
    choice and each end of an interval has been checked. Raises one ConfigError with all problems of all jobs.
    `run.dir` is as the user gave it, or empty.
    """
    if request.config_dir is not None and not os.path.isdir(request.config_dir):
        raise ConfigError(f"--config-dir {request.config_dir}: there is no such directory.")
    if problem := checks.size_problem(request.overrides):
        raise ConfigError(problem)
    composer = Composer(request)
    accepted, refused = accepted_overrides(request, composer)
    space = Space.of(accepted)
    first, *others = space.samples()
    found = [compose_job(first, composer, "recipe" in refused)]
    name = value_at(found[0][0], "sweep.name")
    if request.multirun and not refused and (problems := [*sweep_problems(space, name)]):
        raise ConfigError(texts.summary(problems))  # there may be a million jobs
    if name == GRID and space.size <= MOST_JOBS:
        others = list(space.grid())[1:]
    found += [compose_job(job, composer, "recipe" in refused) for job in others]
    return parsed([*itertools.chain(*refused.values())], found)


def compose_one(composer: Composer, overrides: tuple[str, ...]) -> Config:
    """The checked config of one job that a search has asked for. Raises ConfigError."""
    (config,) = parsed([], [compose_job(overrides, composer)])
    return config


def parsed(problems: Sequence[str], found: Sequence[Composed]) -> list[Config]:
    """The configs of jobs. Raises one ConfigError with these problems and those of the jobs, each once."""
    if distinct := dict.fromkeys([*problems, *itertools.chain(*(of_job for _, of_job in found))]):
        raise ConfigError(texts.summary(list(distinct)))
    absolute = composition.with_absolute_paths
    return [validation.parse(absolute(tree)) for tree, _ in found]


def space_of(overrides: Sequence[str]) -> Space:
    """What the overrides of a checked request vary."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    shared = ("hydra", "sweep")  # settings of the whole sweep, which are no jobs' own
    return Space.of([each for each in parsed if re.split("[./]", each.key_or_group)[0] not in shared])


def sweep_problems(space: Space, name: object) -> Iterator[str]:
    """What makes a sweep of this name impossible, whatever its jobs are."""
    if name != GRID:
        if not space.dimensions:
            advice = "Give at least one key several values or an interval"
            example = "'optim.lr=tag(log, interval(1e-4, 1e-1))'"
            yield f"sweep={name}: nothing is searched. {advice}: {example}."
        yield from filter(None, map(fraction_problem, space.dimensions))
        return
    for each in space.dimensions:
        if isinstance(each, Interval):
            ends = f"{each.low:g},{each.high:g}"
            advice = "To draw from an interval: sweep=random or sweep=tpe."
            yield f"{each.key}=interval({ends}): a grid lists its values: {each.key}=a,b,c. {advice}"
    if MOST_JOBS < space.size < math.inf:
        yield checks.too_many_jobs(int(space.size))


def fraction_problem(dimension: Dimension) -> str | None:
    """The problem of an interval of fractions for a key that takes whole numbers only."""
    rule = rules().get(dimension.key)
    if rule is None or not isinstance(dimension, Interval) or dimension.whole:
        return None
    ends = (dimension.low, dimension.high)
    if any(map(rule.holds, ends)) or not all(end.is_integer() and rule.holds(int(end)) for end in ends):
        return None
    drawn = f"interval({dimension.low:.0f},{dimension.high:.0f})"
    drawn = f"tag(log,{drawn})" if dimension.log else drawn
    return f"{dimension.key}={drawn}: must be {rule.text}. For whole numbers: {dimension.key}=int({drawn})"


def unreadable_problem(line: str, error: Exception, parser: OverridesParser, multirun: bool) -> str:
    """The problem of an override that Hydra cannot parse, with its quoted form where that helps.

    In a sweep, commas separate values, each with its quotes.
    """
    key, has_value, value = line.partition("=")
    if not has_value and re.fullmatch(r"[\w./]+", line):
        return f"{line}: has no value. An override is key=value, for instance {key}=1."
    escaped = value.replace('"', r"\"")
    each = escaped.replace(",", '","') if multirun else escaped
    quoted = f'{key}="{each}"'
    unreadable = f"{line}: cannot be read as key=value ({first_line(error)})."
    if re.match(r"choice\(.*\bnull\b", value):
        return f"{unreadable} Hydra's choice() takes no null. List the values without it: {key}=null,1"
    if value.startswith(("[", "{")) or "${" in value:  # with a mistake in it
        return unreadable
    if value.startswith("(") and value.endswith(")"):  # a tuple of Python
        return f"{line}: a list is written in square brackets: '{key}=[{value[1:-1]}]'"
    try:
        parser.parse_override(quoted)
    except (HydraException, ValueError):
        return unreadable
    advice = "Put the value in double quotes, and the whole in single quotes for the shell"
    problem = "the value has a character that is part of the syntax of overrides, such as = or ("
    return f"{line}: {problem}. {advice}: {shlex.quote(quoted)}"


def accepted_overrides(request: Request, composer: Composer) -> tuple[list[Override], dict[str, list[str]]]:
    """The well-formed overrides that name existing choices, and the problems of the others by key."""
    parser = OverridesParser.create()
    accepted: list[Override] = []
    refused: dict[str, list[str]] = {}
    for line in request.overrides:
        try:
            override = parser.parse_override(line)
            problems = override_problems(override, composer, request.multirun)
        except RecursionError:
            problems = [f"{texts.shortened(line)}: is nested too deeply."]
        except (HydraException, ValueError) as error:
            problems = [unreadable_problem(line, error, parser, request.multirun)]
        if problems:
            refused.setdefault(line.partition("=")[0], []).extend(problems)
        else:
            accepted.append(override)
    return accepted, refused


def override_problems(override: Override, composer: Composer, multirun: bool) -> list[str]:
    if problem := checks.form_problem(override, multirun, lambda: composer.known(())):
        return [problem]
    group, value = override.key_or_group, value_of(override)
    if group not in composer.groups:
        return []
    values = value if override.is_sweep_override() else [value]
    found = (
        recipe_file.file_problem(choice)
        if group == "recipe" and recipe_file.is_recipe_file(choice)
        else checks.choice_problem(group, choice, composer.groups[group])
        for choice in values
    )
    return [problem for problem in found if problem]


def compose_job(overrides: tuple[str, ...], composer: Composer, recipe_refused: bool = False) -> Composed:
    """The tree of one job without its invalid overrides, and all problems."""
    own = recipe_file.recipe_of_overrides(overrides)
    overrides = recipe_file.expanded(overrides)
    choices = tuple(line for line in overrides if line.partition("=")[0].lstrip("~") in composer.groups)
    known = composer.known(choices) | composer.groups.keys()  # not every group is also a key of the tree
    known |= {f"recipe.{name}" for name in own.rules}
    kept, problems = [], list[str]()
    for override in composer.parsed(checks.with_plain_constant(overrides)):
        if override.is_hydra_override():
            continue
        unknown = list(checks.unknown_keys(override.key_or_group, value_of(override), known))
        problems += [unknown_problem(key, value, choices, known, composer) for key, value in unknown]
        if not unknown:
            kept.append(override.input_line or "")
    found = composer.resolved(tuple(kept))
    problems += option_problems(own, found)
    return found, [*problems, *tree_problems(found, composer.groups.get("recipe", ()), recipe_refused)]


def option_problems(recipe: RecipeFunction, tree: Mapping[str, object]) -> Iterator[str]:
    """The problems of the options of a recipe that is a file, whose types only the file has."""
    for name, rule in recipe.rules.items():
        if not rule.holds(value := value_at(tree, f"recipe.{name}")):
            yield value_problem(f"recipe.{name}", value, rule)


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


def _is_unchosen(recipe: Mapping[str, object]) -> bool:
    """A section within it is of a file that lacks `# @package _global_`, which is another problem."""
    nested = any(isinstance(value, Mapping) for value in recipe.values())
    return not nested and recipe.get("name") is None and recipe.get("uses") is None


def tree_problems(tree: dict[str, object], recipes: Sequence[str], recipe_refused: bool) -> Iterator[str]:
    recipe = tree.get("recipe")
    if isinstance(recipe, Mapping) and _is_unchosen(recipe):
        tree = {**tree, "recipe": {"name": "unchosen", "uses": "unchosen"}}
        if not recipe_refused:
            yield f"recipe: none is chosen. Choose one with recipe=<name>: {', '.join(recipes)}."
    yield from validation.find_problems(validation.gather_options(tree))
    yield from unregistered_names(tree)
    for key, path in composition.user_paths(tree, composition.PATH_KEYS):
        # False also for a name that is too long; a NUL has been reported as a wrong value.
        if path and "\0" not in path and not os.path.exists(os.path.expanduser(path)):
            yield f"{key}={path}: there is no such file or directory ({composition.absolute(path)})."


def unregistered_names(tree: Mapping[str, object]) -> Iterator[str]:
    """A name that is not built in, and that no recipe file can have registered: none has the decorator.

    Which names they register is known once they are loaded, which takes torch.
    """
    own = value_at(tree, "recipes.path")
    files = [*recipes_dir().glob("*.py"), *([Path(os.path.expanduser(own))] if isinstance(own, str) else [])]
    for key, (decorator, known) in REGISTERED.items():
        value = value_at(tree, key)
        unknown = [each for each in (value if isinstance(value, list) else [value]) if each not in known]
        if not unknown or not rules()[key].holds(value):
            continue
        if not any(file.is_file() and f"{decorator}(".encode() in file.read_bytes() for file in files):
            rule = one_of(*known)
            more = f", or one that a recipe file of your own (recipes.path) registers with @{decorator}"
            yield value_problem(key, unknown[0], replace(rule, text=rule.text + more))
