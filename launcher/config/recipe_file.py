"""What files of recipes offer, as far as it is known before torch is imported: they are parsed, not executed.

Owns the functions that a file marks with @recipe, and their options, which are keys of the config; and the
recipe that is one file: recipe=mine.py, or recipe=mine.py:name where the file has several.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launcher.config.constraints import Constraint, either, flag, is_number, null, string, whole
from launcher.config.messages import literal, nearest, suggestion
from launcher.errors import ConfigError, first_line

SUFFIX = ".py"
KEY = "recipe"
EMPTY_GROUPS = ("model", "data")  # a file brings its own, unless the command chooses them
FIELDS = ("name", "uses")  # of the config's section that no option can be
LOWEST = -(2**53)
CONSTRAINTS: Mapping[str, Constraint] = {  # of an option, by the name of its type
    "int": Constraint("a whole number", whole(LOWEST).is_valid),
    "float": Constraint("a number", is_number),
    "bool": flag,
    "str": string("a string without NUL characters", lambda value: "\0" not in value),
    "None": null,
}
ANY = Constraint("a value of YAML", lambda value: True)  # of a type that is none of these


@dataclass(frozen=True)
class RecipeFunction:
    """A function under @recipe: its name, and the default and the constraint of each option.

    `arguments` are the names of all options, also of those whose default is an expression; None: any name.
    """

    name: str
    arguments: frozenset[str] | None
    defaults: Mapping[str, object]
    constraints: Mapping[str, Constraint]


def is_recipe_file(choice: object) -> bool:
    """Whether a value of `recipe` is a file and not the name of a choice."""
    return isinstance(choice, str) and _split(choice)[0].endswith(SUFFIX)


def recipe_of(choice: str) -> RecipeFunction:
    """The function that `mine.py` or `mine.py:name` chooses. Raises ConfigError."""
    file, name = _split(choice)
    functions = _functions(choice, Path(os.path.expanduser(file)))
    names = [*functions]
    if not name and len(names) > 1:
        raise ConfigError(
            f"recipe={choice}: the file has the recipes {', '.join(names)}. Choose one: "
            f"recipe={file}:{names[0]}"
        )
    if name and name not in names:
        raise ConfigError(
            f"recipe={choice}: the file has no @recipe of this name.{suggestion(nearest(name, names))} "
            f"It has: {', '.join(names)}."
        )
    return functions[name or names[0]]


def offered(files: Iterable[Path]) -> dict[str, RecipeFunction] | None:
    """What these files offer under @recipe, by name.

    None where that is known only once they run: a name is computed, or a file cannot be parsed.
    """
    found: dict[str, RecipeFunction] = {}
    for file in files:
        try:
            found |= _offered_in(file.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return None
    return found


@cache  # each job of a sweep asks
def _offered_in(source: bytes) -> dict[str, RecipeFunction]:
    """What `offered` finds in one file. Raises ValueError where a name is computed."""
    found: dict[str, RecipeFunction] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            found |= {name: _function(node, name) for name in _recipe_names(node)}
        elif isinstance(node, ast.Call) and _called(node.func) == KEY:
            for given in _names_given(node):  # recipe("name")(function), which may be any function
                name = str(ast.literal_eval(given))
                found.setdefault(name, RecipeFunction(name, None, {}, {}))
    return found


def chosen_file(overrides: Sequence[str]) -> str | None:
    """The file in the last `recipe=FILE` of these overrides; None where another recipe is chosen, or none."""
    lines = [line.partition("=")[2].strip("'\"") for line in overrides if line.startswith(f"{KEY}=")]
    return lines[-1] if lines and is_recipe_file(lines[-1]) else None


def expanded(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides with the keys that recipe=FILE stands for, as Hydra can compose them.

    Its options are added with their defaults, and the groups that no override chooses are left out.
    """
    choice = chosen_file(overrides)
    if choice is None:
        return tuple(overrides)
    recipe = recipe_of(choice)
    given = {line.partition("=")[0] for line in overrides}
    others = [line for line in overrides if line.partition("=")[0] != KEY]
    return (
        *(f"~{group}" for group in EMPTY_GROUPS if group not in given),
        f"recipes.path={literal(_split(choice)[0])}",
        *(f"recipe.{key}={literal(recipe.name)}" for key in ("name", "uses")),
        *(f"++recipe.{key}={literal(default)}" for key, default in recipe.defaults.items()),
        *others,
    )


def _split(choice: str) -> tuple[str, str]:
    file, colon, name = choice.rpartition(":")
    return (file, name) if colon and file.endswith(SUFFIX) else (choice, "")


def _functions(choice: str, path: Path) -> dict[str, RecipeFunction]:
    """The functions under @recipe at the top level of the file, at least one. Raises ConfigError."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(
            f"recipe={choice}: {path}{line}: {type(error).__name__}: {first_line(error)}."
        ) from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = {name: _function(node, name) for node in functions for name in _recipe_names(node)}
    if not found:
        first = next((node for node in functions if node.args.args), None)
        where = (
            f"above line {first.lineno}, def {first.name}(...)"
            if first
            else "above a function of (config: Config)"
        )
        raise ConfigError(
            f"recipe={choice}: no function of {path} is marked as a recipe. Write @recipe {where}, with "
            "`from launcher.recipe import recipe` at the top of the file."
        )
    return found


def _recipe_names(node: ast.FunctionDef) -> Iterator[str]:
    """The names under which @recipe offers the function: one that is given, or that of the function."""
    for decorator in node.decorator_list:
        called = decorator if isinstance(decorator, ast.Call) else None
        given = _names_given(called) if called else []
        if _called(called.func if called else decorator) == KEY:
            yield str(given[0].value) if given and isinstance(given[0], ast.Constant) else node.name


def _names_given(call: ast.Call) -> list[ast.expr]:
    """The name in @recipe("x") or @recipe(name="x"), if there is one."""
    return [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "name")]


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _function(node: ast.FunctionDef, name: str) -> RecipeFunction:
    positional = [*node.args.posonlyargs, *node.args.args]
    without = len(positional) - len(node.args.defaults)
    pairs = [
        *zip(positional[without:], node.args.defaults, strict=True),
        *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
    ]
    defaults: dict[str, object] = {}
    constraints: dict[str, Constraint] = {}
    for argument, default in pairs:
        if default is None:
            continue
        if argument.arg in FIELDS:
            raise ConfigError(
                f"@recipe {name}: an option cannot be called {argument.arg}: recipe.{argument.arg} is "
                "another key. Rename it."
            )
        try:
            defaults[argument.arg] = ast.literal_eval(default)
        except ValueError:
            continue  # an expression: it has its value in the function, and is no key of the config
        constraints[argument.arg] = _constraint(argument.annotation, defaults[argument.arg])
    names = frozenset(each.arg for each in (*positional[1:], *node.args.kwonlyargs))
    return RecipeFunction(name, None if node.args.kwarg else names, defaults, constraints)


def _constraint(annotation: ast.expr | None, default: object) -> Constraint:
    """The constraint of an option: of its annotation, and without one of its default."""
    if annotation is None:
        return CONSTRAINTS.get(type(default).__name__, ANY)
    members = [each.strip() for each in ast.unparse(annotation).strip("'\"").split("|")]
    if all(member in CONSTRAINTS for member in members):
        return either(*(CONSTRAINTS[member] for member in members))
    return ANY
