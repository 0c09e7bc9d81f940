"""Composes group choices and overrides into one tree of values, through Hydra.

Owns composition. Hydra's own settings, which can name code, are not used, whatever a file says of them.
`launcher.config.resolve` decides which overrides are composed. Never imports torch and creates no file.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from launcher.config.constraints import text
from launcher.config.groups import conf_dir, group_choices
from launcher.config.messages import quoted
from launcher.config.overrides import CALL, credential_problem, texts
from launcher.config.schema import constraints, leaves, paths_of, value_at
from launcher.errors import ConfigError, first_line

HYDRA_VERSION = "1.3"  # version_base: the defaults that Hydra had in this version
# data.csv is of some data sets. data.cache is made, and a run that resumes does not need model.init_from.
PATH_KEYS = ("data.path", "data.csv", "recipes.path", "checkpoint.resume", "data.cache", "model.init_from")
MAY_BE_ABSENT = ("data.cache", "model.init_from")
WARMUP = "schedule.warmup_fraction"
# Accepted in place of a path.
WORDS = {"checkpoint.resume": ("auto", "never"), "data.cache": ("auto", "none")}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
Tree = dict[str, Any]


@cache
def parsed(line: str) -> Override:
    """An override, parsed once: it takes 1 ms, and the jobs of a sweep share most. Not to be changed."""
    return OverridesParser.create().parse_override(line)


@dataclass(frozen=True)
class Request:
    """What the user asked for: one run, or with `multirun` a sweep."""

    overrides: tuple[str, ...]
    config_dir: Path | None = None  # the user's config directory
    multirun: bool = False

    @property
    def directories(self) -> tuple[Path, ...]:
        """Config directories in search order."""
        return (conf_dir(),) if self.config_dir is None else (conf_dir(), self.config_dir.absolute())

    def value_of(self, key: str) -> object:
        """The value that the overrides give to a key, the last one; None without one that can be read."""
        lines = [line for line in self.overrides if line.startswith(f"{key}=")]
        with suppress(HydraException):  # reported with all others
            return parsed(lines[-1]).value() if lines else None
        return None


class Composer:
    """Composes once per set of group choices, and applies values to a copy of the result.

    Hydra would read all files again for each job of a sweep, in 0.2 s. Values cannot change which files are
    read, and `launcher.config.resolve` accepts none that adds a key or deletes one.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.groups = group_choices(*request.directories)
        self.bases: dict[tuple[str, ...], tuple[DictConfig, frozenset[str]]] = {}  # by the choices

    def resolved(self, overrides: tuple[str, ...]) -> Tree:
        """The tree with these overrides, whose keys exist. Raises ConfigError for what YAML must not have."""
        given = [*map(parsed, overrides)]
        choices = [each.input_line or "" for each in given if each.key_or_group in self.groups]
        base, _ = self.base(tuple(choices))
        config = copy.deepcopy(base)
        values = {override.key_or_group: override.value() for override in given}
        if values.get("schedule") == "constant":
            # The recipe's warm-up, which is composed last, belongs to the recipe's own schedule.
            OmegaConf.update(config, WARMUP, 0)
        for override in given:
            if override.key_or_group not in self.groups:
                OmegaConf.update(config, override.key_or_group, override.value())
        tree = resolved(config)
        if "train.max_steps" in values and "train.epochs" not in values and value_at(tree, "train.max_steps"):
            tree["train"]["epochs"] = None  # else that of the recipe would end the run in silence
        if isinstance(resume := value_at(tree, "checkpoint.resume"), bool):  # as other programs have it
            tree["checkpoint"]["resume"] = "auto" if resume else "never"
        return tree

    def base(self, choices: tuple[str, ...]) -> tuple[DictConfig, frozenset[str]]:
        """What these choices compose to, and the keys of it."""
        if choices not in self.bases:
            tree = cast(Tree, OmegaConf.to_container(compose(self.request, choices)))
            self.bases[choices] = OmegaConf.create(tree), frozenset(paths_of(tree))
        return self.bases[choices]

    def known(self, choices: tuple[str, ...]) -> frozenset[str]:
        """The keys of the tree with these group choices."""
        return self.base(choices)[1]


def compose(request: Request, overrides: Sequence[str]) -> DictConfig:
    """Compose with Hydra. Raises ConfigError for its failures."""
    own = ",".join(quoted(f"file://{directory}") for directory in request.directories[1:])
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION, job_name="launcher"):
            return hydra.compose("config", [f"hydra.searchpath=[{own}]", *overrides])
    except (
        HydraException,
        OmegaConfBaseException,
        YAMLError,
        ValueError,
        OSError,
        RecursionError,  # a `defaults:` list that includes its own file
    ) as error:
        reason = f"{error} {error.__cause__ or ''}".partition("Config search path:")[0]
        raise ConfigError(f"the config files cannot be composed: {' '.join(reason.split())}") from error


def resolved(config: DictConfig) -> Tree:
    """The tree with all interpolations resolved. Raises ConfigError for one that cannot or must not be."""
    unresolved = cast(Tree, OmegaConf.to_container(config))
    for key, value in unresolved.items():
        if problem := credential_problem(value):
            raise ConfigError(f"`{key}` in the config files: {problem}")
    if not any("${" in each for each in texts(unresolved)):
        return unresolved
    try:
        for path, value in leaves(unresolved):
            if isinstance(value, str) and CALL.fullmatch(value):
                found = typed(path, OmegaConf.select(config, path))
                if not isinstance(found, str):  # a text with ${...} would be resolved again
                    OmegaConf.update(config, path, found)
        return cast(Tree, OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}.") from error


def typed(path: str, value: object) -> object:
    """A variable's text as the type of its key: 3 is a number for seed, and a text for tracker.group."""
    constraint = constraints().get(path)
    if not isinstance(value, str) or (constraint is not None and constraint.is_valid(value)):
        return value
    found: object = {"null": None, "true": True, "false": False}.get(value.lower(), value)
    for kind in (float, int):
        with suppress(ValueError):
            found = kind(value)
    return found


def make_paths_absolute(tree: Tree) -> Iterator[str]:
    """Make the user's paths absolute, on which a run's records must not depend; yields what is not there.

    A word, such as auto, and a name of the Hugging Face hub are no paths.
    """
    for key in PATH_KEYS:
        path = value_at(tree, key)
        if not isinstance(path, str) or not text.is_valid(path):  # null, or a wrong value
            continue
        if path not in WORDS.get(key, ()) and not is_hub_name(tree, key, path):
            section, _, name = key.partition(".")
            tree[section][name] = absolute = str(Path(os.path.expanduser(path)).resolve())
            if key not in MAY_BE_ABSENT and not os.path.exists(absolute):  # False also for too long a name
                yield f"{key}={path}: there is no such file or directory ({absolute})."


def is_hub_name(tree: Mapping[str, object], key: str, path: str) -> bool:
    """Whether a path names a data set of the Hugging Face hub, user/name, and nothing that is here."""
    if key != "data.path" or value_at(tree, "data.name") != "hf" or path.startswith("."):
        return False
    return HUB_NAME.fullmatch(path) is not None and not Path(path).exists()
