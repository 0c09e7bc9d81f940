"""From the command line to the checked config of each job.

Owns the order of the checks: single overrides first, then unknown keys, then values. Reports all problems of
all jobs before any job starts. Never imports torch and creates no file.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from launcher.config import messages as texts
from launcher.config import parameter_groups, validation
from launcher.config.composition import (
    PATH_KEYS,
    Composer,
    Request,
    Resolved,
    absolute,
    user_paths,
    with_absolute_paths,
)
from launcher.config.groups import choice_values, recipes_dir
from launcher.config.optimizers import OPTIMIZERS
from launcher.config.overrides import (
    KEYS_ELSEWHERE,
    MOST_JOBS,
    choice_problem,
    form_problem,
    size_problem,
    too_many_jobs,
    unknown_keys,
    value_of,
    with_plain_constant,
)
from launcher.config.rules import SCHEDULES, TRACKERS, one_of, value_problem
from launcher.config.schema import Config, rules
from launcher.config.search_space import Dimension, Interval, Space
from launcher.config.trees import paths_of, value_at
from launcher.errors import ConfigError, first_line

GRID = "grid"
REGISTERED: Mapping[str, tuple[str, Sequence[str]]] = {  # the decorator, and the names that are built in
    "schedule.name": ("schedule", SCHEDULES),
    "optim.name": ("optimizer", tuple(OPTIMIZERS)),
    "tracker.name": ("tracker", TRACKERS),
}


@dataclass
class Findings:
    """Problems in the order of their discovery, each once, and the keys that were dropped for them."""

    lines: dict[str, None] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def add(self, *problems: str) -> None:
        self.lines.update(dict.fromkeys(problems))

    def raise_if_any(self) -> None:
        if self.lines:
            raise ConfigError(texts.summary(list(self.lines)))


def compose_jobs(request: Request) -> list[Config]:
    """The checked config of each job of the request, in Hydra's order; one for a single run.

    Of a search, whose jobs are not known yet, those that `Space.samples` has: the first job starts after each
    choice and each end of an interval has been checked. Raises one ConfigError with all problems of all jobs.
    `run.dir` is as the user gave it, or empty.
    """
    if request.config_dir is not None and not os.path.isdir(request.config_dir):
        raise ConfigError(f"--config-dir {request.config_dir}: there is no such directory.")
    if problem := size_problem(request.overrides):
        raise ConfigError(problem)
    findings = Findings()
    composer = Composer(request)
    space = Space.of(accepted_overrides(request, composer, findings))
    first, *others = space.samples()
    of_first = Findings(refused=findings.refused)
    found = [compose_job(first, composer, of_first)]
    name = value_at(found[0].tree, "sweep.name")
    problems = [*sweep_problems(space, name)] if request.multirun and not findings.refused else []
    findings.add(*(problems or of_first.lines))
    if problems:
        others = []  # there may be a million of them
    elif name == GRID and space.size <= MOST_JOBS:
        others = list(space.grid())[1:]
    found += [compose_job(job, composer, findings) for job in others]
    findings.raise_if_any()
    return [validation.parse(with_absolute_paths(each.tree), each.recorded) for each in found]


def compose_one(composer: Composer, overrides: tuple[str, ...]) -> Config:
    """The checked config of one job that a search has asked for. Raises ConfigError."""
    findings = Findings()
    found = compose_job(overrides, composer, findings)
    findings.raise_if_any()
    return validation.parse(with_absolute_paths(found.tree), found.recorded)


def space_of(overrides: Sequence[str]) -> Space:
    """What the overrides of a checked request vary."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    shared = ("hydra", "sweep")  # settings of the whole sweep, which are no jobs' own
    return Space.of([each for each in parsed if re.split("[./]", each.key_or_group)[0] not in shared])


def sweep_problems(space: Space, name: object) -> Iterator[str]:
    """What makes a sweep of this name impossible, whatever its jobs are."""
    if name != GRID:
        if not space.dimensions:
            yield (
                f"sweep={name}: nothing is searched. Give at least one key several values or an interval: "
                "'optim.lr=tag(log, interval(1e-4, 1e-1))'."
            )
        yield from filter(None, map(fraction_problem, space.dimensions))
        return
    for each in space.dimensions:
        if isinstance(each, Interval):
            ends = f"{each.low:g},{each.high:g}"
            yield (
                f"{each.key}=interval({ends}): a grid lists its values: {each.key}=a,b,c. To draw from an "
                "interval: sweep=random or sweep=tpe."
            )
    if MOST_JOBS < space.size < math.inf:
        yield too_many_jobs(int(space.size))


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
    return (
        f"{dimension.key}={drawn}: must be {rule.text}. To draw whole numbers: {dimension.key}=int({drawn})"
    )


def unreadable_problem(line: str, error: Exception, parser: OverridesParser) -> str:
    """The problem of an override that Hydra cannot parse, with its quoted form where that helps."""
    key, has_value, value = line.partition("=")
    if not has_value and re.fullmatch(r"[\w./]+", line):
        return f"{line}: has no value. An override is key=value, for instance {key}=1."
    escaped = value.replace('"', r"\"")
    quoted = f'{key}="{escaped}"'
    unreadable = f"{line}: cannot be read as key=value ({first_line(error)})."
    if re.match(r"choice\(.*\bnull\b", value):
        return f"{unreadable} Hydra's choice() takes no null. List the values without it: {key}=null,1"
    if value.startswith(("[", "{")) or "${" in value:  # with a mistake in it
        return unreadable
    try:
        parser.parse_override(quoted)
    except (HydraException, ValueError):
        return unreadable
    return (
        f"{line}: the value has a character that is part of the syntax of overrides, such as = or (. "
        f"Put the value in double quotes, and the whole in single quotes for the shell: {shlex.quote(quoted)}"
    )


def accepted_overrides(request: Request, composer: Composer, findings: Findings) -> list[Override]:
    """The well-formed overrides that name existing choices; the others become findings."""
    parser = OverridesParser.create()
    accepted = []
    for line in request.overrides:
        try:
            override = parser.parse_override(line)
            problems = override_problems(override, composer, request.multirun)
        except RecursionError:
            problems = [f"{texts.shortened(line)}: is nested too deeply."]
        except (HydraException, ValueError) as error:
            problems = [unreadable_problem(line, error, parser)]
        findings.add(*problems)
        if problems:
            findings.refused.add(line.partition("=")[0])
        else:
            accepted.append(override)
    return accepted


def override_problems(override: Override, composer: Composer, multirun: bool) -> list[str]:
    problem = form_problem(override, multirun, lambda: composer.known(()))
    if problem:
        return [problem]
    group, groups = override.key_or_group, composer.groups
    if group not in groups:
        return []
    value = value_of(override)
    values = value if override.is_sweep_override() else [value]
    found = (choice_problem(group, choice, groups[group]) for choice in values)
    return [problem for problem in found if problem]


def compose_job(overrides: tuple[str, ...], composer: Composer, findings: Findings) -> Resolved:
    """The tree of one job without its invalid overrides, which become findings."""
    choices = tuple(line for line in overrides if line.partition("=")[0] in composer.groups)
    known = composer.known(choices) | composer.groups.keys()  # not every group is also a key of the tree
    kept = []
    for override in composer.parsed(with_plain_constant(overrides)):
        if override.is_hydra_override():
            continue
        key, value = override.key_or_group, value_of(override)
        unknown = list(unknown_keys(key, value, known))
        findings.add(*(unknown_problem(key, value, choices, composer) for key, value in unknown))
        if not unknown:
            kept.append(override.input_line or "")
    found = composer.resolved(tuple(kept))
    findings.add(*tree_problems(found, composer.groups, "recipe" in findings.refused))
    return found


def unknown_problem(key: str, value: object, choices: tuple[str, ...], composer: Composer) -> str:
    """The message for a key that the tree lacks: the choices that have it, or the nearest keys."""
    written = f"{key}={texts.show(value)}"
    if key.startswith(f"{parameter_groups.KEY}."):
        return f"{written}: {parameter_groups.KEY} is one list, set as a whole: {parameter_groups.EXAMPLE}."
    group, _, inner = key.partition(".")
    directories = composer.request.directories
    having = [
        f"{group}={choice}"
        for choice in composer.groups.get(group, ())
        if inner in paths_of(choice_values(directories, group, choice))
    ]
    for own, elsewhere in KEYS_ELSEWHERE.items():
        if key in elsewhere.split():
            here, _, other = own.partition("=")
            typed = f"{here}={other or texts.show(value)}"
            return f"{written}: there is no such key. It is called {here} here: {typed}."
    if having:
        return f"{written}: this key belongs to {' and '.join(having)} only."
    return texts.unknown_key(written, key, composer.known(choices))


def tree_problems(
    found: Resolved, groups: Mapping[str, Sequence[str]], recipe_refused: bool
) -> Iterator[str]:
    tree = found.tree
    if tree.get("recipe") == {"name": None, "uses": None}:
        tree = {**tree, "recipe": {"name": "unchosen", "uses": "unchosen"}}
        if not recipe_refused:
            recipes = ", ".join(groups.get("recipe", ()))
            yield f"recipe: none is chosen. Choose one with recipe=<name>: {recipes}."
    yield from validation.find_problems(validation.gather_options(tree), found.recorded)
    yield from unregistered_names(tree, found.recorded)
    for key, path in user_paths(tree, PATH_KEYS):
        # False also for a name that is too long; a NUL has been reported as a wrong value.
        if path and "\0" not in path and not os.path.exists(Path(path).expanduser()):
            written = found.recorded.get(key)
            where = f"{path}: there is no such file or directory ({absolute(path)})."
            yield f"{key}={where if written is None else f'{written}: there is no such file.'}"


def unregistered_names(tree: Mapping[str, object], recorded: Mapping[str, object]) -> Iterator[str]:
    """A name that is not built in, and that no recipe file can have registered: none has the decorator.

    Which names they register is known once they are loaded, which takes torch.
    """
    own = value_at(tree, "recipes.path")
    files = [*recipes_dir().glob("*.py"), *([Path(own).expanduser()] if isinstance(own, str) else [])]
    for key, (decorator, known) in REGISTERED.items():
        value = value_at(tree, key)
        unknown = [each for each in (value if isinstance(value, list) else [value]) if each not in known]
        if not unknown or not rules()[key].holds(value):
            continue
        if not any(file.is_file() and f"{decorator}(".encode() in file.read_bytes() for file in files):
            rule = one_of(*known)
            more = f", or one that a recipe file of your own (recipes.path) registers with @{decorator}"
            yield value_problem(key, recorded.get(key, unknown[0]), replace(rule, text=rule.text + more))
