"""Where the YAML that users choose from and the built-in recipes lie.

In a clone both are folders beside the package, in a wheel folders inside it. Never imports anything
heavy and never looks outside the installation.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]


def conf_dir() -> Path:
    return resource_dir("conf")


def recipes_dir() -> Path:
    return resource_dir("recipes")


def resource_dir(name: str) -> Path:
    """The clone's own folder if this is a clone, so that a wheel's copy can never hide an edit."""
    in_clone = PACKAGE.parent / name
    is_clone = (PACKAGE.parent / "pyproject.toml").is_file()
    return in_clone if is_clone else PACKAGE / name


def group_choices(*directories: Path) -> dict[str, list[str]]:
    """The config groups of these trees (recipe, model, ...) and the names that each offers, sorted."""
    choices: dict[str, set[str]] = {}
    for directory in directories:
        for file in directory.glob("*/*.yaml"):
            if file.is_file():  # neither a pipe nor a link that leads nowhere
                choices.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names, key=natural_order) for group, names in sorted(choices.items())}


def choice_file(directories: Sequence[Path], group: str, name: str) -> Path:
    """The YAML of one choice in the first of these trees that has it."""
    files = (directory / group / f"{name}.yaml" for directory in directories)
    return next(file for file in files if file.is_file())


def choice_values(directories: Sequence[Path], group: str, name: str) -> dict[str, Any]:
    """What that file says by itself, before any composition. ConfigError if it is not YAML."""
    import yaml

    from launcher.config.files import checked_text

    file = choice_file(directories, group, name)
    try:
        values = yaml.safe_load(checked_text(file))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    return values if isinstance(values, dict) else {}


def natural_order(name: str) -> list[tuple[int, str]]:
    """resnet18 before resnet101."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def description(file: Path) -> str:
    """The comment that a recipe's YAML begins with."""
    from launcher.config.files import checked_text

    lines = [line for line in checked_text(file).splitlines() if "@package" not in line]
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment)
