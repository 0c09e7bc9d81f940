"""Locations of the config groups and of the built-in recipes.

In a clone both are folders beside the package; in a wheel they are inside it. Imports neither torch nor
Hydra.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]


def conf_dir() -> Path:
    return resource_dir("conf")


def recipes_dir() -> Path:
    return resource_dir("recipes")


def resource_dir(name: str) -> Path:
    """The clone's folder if this is a clone, so that a wheel's copy never hides an edit."""
    is_clone = (PACKAGE.parent / "pyproject.toml").is_file()
    return (PACKAGE.parent if is_clone else PACKAGE) / name


def group_choices(*directories: Path) -> dict[str, list[str]]:
    """The config groups of these trees (recipe, model, ...) and the names that each offers, sorted."""
    choices: dict[str, set[str]] = {}
    for directory in directories:
        for file in directory.glob("*/*.yaml"):
            choices.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names, key=natural_order) for group, names in sorted(choices.items())}


def choice_file(directories: Sequence[Path], group: str, name: str) -> Path:
    """The YAML file of one choice, from the first of these trees that has it."""
    files = (directory / group / f"{name}.yaml" for directory in directories)
    return next(file for file in files if file.is_file())


def choice_values(directories: Sequence[Path], group: str, name: str) -> dict[str, object]:
    """The keys of a choice, those of the choices that it begins with included.

    Raises ConfigError for a file that is no YAML.
    """
    import yaml

    known = group_choices(*directories)[group]
    values: dict[str, object] = {}
    ahead, names = [name], set[str]()
    while ahead:
        names.add(each := ahead.pop())
        file = choice_file(directories, group, each)
        try:
            content = yaml.safe_load(file.read_bytes())
        except yaml.YAMLError as error:
            raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            continue
        values = {**content, **values}
        if isinstance(bases := content.get("defaults"), list):
            ahead += [base for base in bases if base in known and base not in names]
    return values


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts resnet18 before resnet101."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def description(file: Path) -> str:
    """The comment at the top of a recipe's YAML."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if "@package" not in line]
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.lstrip("# ") for line in comment)
