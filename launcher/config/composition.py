"""Composes group choices and overrides into one tree of values, through Hydra.

Owns composition and the check of what YAML files must not contain: code, resolvers, Hydra's own settings.
`launcher.config.resolve` decides which overrides are composed. Never imports torch and creates no file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import hydra
from hydra._internal.core_plugins.file_config_source import FileConfigSource as HydraFiles
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from yaml import YAMLError

from launcher.config.environment_values import CALL, typed
from launcher.config.files import checked_text
from launcher.config.groups import conf_dir, group_choices
from launcher.config.messages import nearest, quoted, show, suggestion
from launcher.config.overrides import code_problem
from launcher.config.schema import SweepConfig, types_of
from launcher.config.trees import leaves, merged, paths_of, replaced, texts, value_at
from launcher.errors import ConfigError, first_line

HYDRA_VERSION = "1.3"  # version_base: the defaults that Hydra had in this version
PATH_KEYS = ("data.path", "data.csv", "recipes.path", "checkpoint.resume")  # csv: of some data sets
# The first is made where it does not exist, and a run that resumes does not need the second.
UNCHECKED_PATH_KEYS = ("data.cache", "model.init_from")
NOT_PATHS = ("auto", "never", "none")  # accepted in place of a path
MISSING_KEY = re.compile(r"Interpolation key '([^']+)'")  # of OmegaConf's error
OPTIONS = "Available options in "  # of Hydra's error for an unknown choice
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# The section that an interpolation names; "" if none can be read.
ROOT = re.compile(r"\$\{\s*([A-Za-z_]\w*)?")
SWEEP = "sweep"  # in an experiment's file also the swept values, already expanded when a job is composed
HYDRA_FILLS_IN = ("overrides", "runtime", "searchpath", "mode", "job")


@dataclass(frozen=True)
class Request:
    """What the user asked for: one run, or with `multirun` a sweep."""

    overrides: tuple[str, ...]
    config_dir: Path | None = None  # the user's config directory
    config_name: str = "config"
    multirun: bool = False

    @property
    def directories(self) -> tuple[Path, ...]:
        """Config directories in search order; the one with the primary config comes first."""
        if self.config_dir is None:
            return (conf_dir(),)
        own = self.config_dir.absolute()
        is_primary = os.path.isfile(own / f"{self.config_name}.yaml")
        return tuple(dict.fromkeys((own, conf_dir()) if is_primary else (conf_dir(), own)))

    def value_of(self, key: str) -> object:
        """The value that the overrides give to a key, the last one; None without one."""
        lines = [line for line in self.overrides if line.startswith(f"{key}=")]
        return OverridesParser.create().parse_override(lines[-1]).value() if lines else None

    @property
    def search_path(self) -> str:
        """The search path as an override: only an override takes precedence over a primary config."""
        listed = (quoted(f"file://{directory}") for directory in self.directories[1:])
        return f"hydra.searchpath=[{','.join(listed)}]"


def resolved(unresolved: dict[str, object]) -> dict[str, object]:
    """The tree with all interpolations resolved. Raises ConfigError for one that cannot be."""
    if not any("${" in text for text in texts(unresolved)):
        return unresolved
    tree = by_omegaconf(unresolved)
    calls = {path for path, value in leaves(unresolved) if isinstance(value, str) and CALL.fullmatch(value)}
    return replaced(tree, {path: typed(path, value) for path, value in leaves(tree) if path in calls})


def by_omegaconf(unresolved: dict[str, object]) -> dict[str, object]:
    """The tree with all interpolations resolved. Raises ConfigError for one that cannot be."""
    try:  # not of all sections, whose nodes take 8 ms
        resolved = OmegaConf.to_container(OmegaConf.create(sections_of(unresolved)), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(interpolation_text(error, unresolved)) from error
    return unresolved | cast(dict[str, object], resolved)


def sections_of(tree: dict[str, object]) -> dict[str, object]:
    """The sections with interpolations, and those that they refer to."""
    found: set[str] = set()
    new = {key for key, value in tree.items() if any("${" in text for text in texts(value))}
    while new:
        found |= new
        roots = {root for key in new for text in texts(tree[key]) for root in ROOT.findall(text)}
        new = (tree.keys() if "" in roots else roots & tree.keys()) - found
    return {key: value for key, value in tree.items() if key in found}


class Composer:
    """Composes once per set of group choices, and applies values to the result, as Hydra does it.

    Hydra would read all files again for each job of a sweep. Values cannot change which files are read, and
    `launcher.config.overrides` accepts none that adds a key or deletes one.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.groups = group_choices(*request.directories)
        self.bases: dict[tuple[str, ...], dict[str, object]] = {}  # by the overrides that name choices
        self.lines: dict[str, Override] = {}

    def parsed(self, lines: Sequence[str]) -> list[Override]:
        """The overrides, each parsed once: it takes 1 ms, and the jobs of a sweep share most. Not changed."""
        if new := [line for line in lines if line not in self.lines]:
            self.lines.update(zip(new, OverridesParser.create().parse_overrides(new), strict=True))
        return [self.lines[line] for line in lines]

    def resolved(self, overrides: tuple[str, ...]) -> dict[str, object]:
        """The tree with these overrides, whose keys exist. Raises ConfigError for what YAML must not have."""
        parsed = self.parsed(overrides)
        tree = self.base(tuple(each.input_line or "" for each in parsed if self.is_choice(each)))
        for override in parsed:
            if not self.is_choice(override):
                tree = merged(tree, override.key_or_group, override.value())
        given = {override.key_or_group for override in parsed}
        if "train.max_steps" in given and "train.epochs" not in given and value_at(tree, "train.max_steps"):
            tree = replaced(
                tree, {"train.epochs": None}
            )  # else that of the recipe would end the run in silence
        if isinstance(resume := value_at(tree, "checkpoint.resume"), bool):  # as other programs have it
            tree = replaced(tree, {"checkpoint.resume": "auto" if resume else "never"})
        for key, value in tree.items():
            if problem := code_problem(str(key), value):
                raise ConfigError(f"`{key}` in the config files: {problem}")
        return resolved(tree)

    def is_choice(self, override: Override) -> bool:
        """Whether it decides which files are read; Hydra takes a mapping for the values of a section."""
        return override.key_or_group in self.groups and not isinstance(override.value(), dict)

    def base(self, choices: tuple[str, ...]) -> dict[str, object]:
        """The tree as composed from files, interpolations unresolved, without the section `hydra`."""
        if choices not in self.bases:
            composed = compose(self.request, choices)
            settings = composed.pop("hydra")
            if self.request.config_dir is not None and fixed(settings) != fixed_hydra_settings():
                where = f"{self.request.config_dir}: a config file changes Hydra's own settings (`hydra:`)"
                advice = "Remove them; the defaults of a primary config begin with `- config`."
                raise ConfigError(f"{where}. They are fixed, because they can name code to execute. {advice}")
            keep_sweep_settings(composed)
            self.bases[choices] = composed
        return self.bases[choices]

    def known(self, choices: tuple[str, ...]) -> frozenset[str]:
        """The keys of the tree with these group choices."""
        return frozenset(paths_of(self.base(choices)))


def keep_sweep_settings(tree: dict[str, object]) -> None:
    """Remove from the section `sweep` what an experiment sweeps over."""
    if isinstance(section := tree.get(SWEEP), dict):
        tree[SWEEP] = {key: value for key, value in section.items() if key in types_of(SweepConfig)}


def with_absolute_paths(tree: dict[str, object]) -> dict[str, object]:
    """Make the user's paths absolute: a run's records must not depend on its working directory."""
    paths = user_paths(tree, (*PATH_KEYS, *UNCHECKED_PATH_KEYS))
    return replaced(tree, {key: absolute(path) if path else None for key, path in paths})


def user_paths(tree: Mapping[str, object], keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those of the keys that hold a path, neither a word nor a name of the Hugging Face hub, with it."""
    for key in keys:
        path = value_at(tree, key)
        if isinstance(path, str) and path not in NOT_PATHS and not is_hub_name(tree, key, path):
            yield key, path


def is_hub_name(tree: Mapping[str, object], key: str, path: str) -> bool:
    """Whether a path names a data set of the Hugging Face hub, user/name, and nothing that is here."""
    if key != "data.path" or value_at(tree, "data.name") != "hf" or path.startswith("."):
        return False
    return HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def absolute(path: str) -> str:
    return str(Path(os.path.expanduser(path)).resolve())


def compose(request: Request, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose with Hydra, including the `hydra` section. Raises ConfigError for its failures."""
    check_files()
    first, lines = str(request.directories[0]), [request.search_path, *overrides]
    try:
        with hydra.initialize_config_dir(first, version_base=HYDRA_VERSION, job_name="launcher"):
            composed = hydra.compose(request.config_name, lines, return_hydra_config=True)
    except RecursionError as error:
        cycle = "a `defaults:` list includes its own file, directly or through another, or a value is nested"
        raise ConfigError(f"the config files cannot be composed: {cycle} too deeply.") from error
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:  # of os.getcwd
            problem = "the working directory has been deleted"
            raise ConfigError(f"{problem}. Change to one that exists, and run the command again.") from error
        cause = str(error.__cause__) if error.__cause__ else ""
        about, _, options = str(error).partition(OPTIONS)
        reasons = [line.strip() for line in f"{about}\n{cause}".splitlines() if line.strip()][:4]
        if options:  # all names of the group, a line each; then where Hydra has searched for them
            group, *names = options.partition("Config search path:")[0].split()
            reasons.append(f"{OPTIONS}{group} {', '.join(names)}.")
        raise ConfigError(f"the config files cannot be composed: {' '.join(reasons)}") from error
    return cast(dict[str, object], OmegaConf.to_container(composed))


class FileConfigSource(HydraFiles):
    """Hydra's reader of YAML files, with the limits of a config file for the user's files.

    Has the name of the class that it replaces: Hydra's registry raises for a class of another name.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path)).resolve()
        if conf_dir() not in file.parents:
            checked_text(file)
        try:
            return super().load_config(config_path)
        except ValueError as error:
            if "integer string conversion" not in str(error):
                raise ConfigError(f"{file}: {first_line(error)}") from error
            most = f"{sys.get_int_max_str_digits():,} digits"
            raise ConfigError(f"{file}: has a whole number of more than {most}; no key takes one.") from error


def check_files() -> None:
    """Make Hydra check each of the user's YAML files before reading it; Hydra has no hook for this."""
    Plugins.instance()  # first, otherwise it would register its own reader later
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = FileConfigSource


@cache
def fixed_hydra_settings() -> dict[str, object]:
    """Hydra's settings without any files of the user, which never differ within a process."""
    return fixed(compose(Request(overrides=()), ())["hydra"])


def fixed(settings: Mapping[str, Any]) -> dict[str, object]:
    """Those of Hydra's settings that no file of the user may change."""
    env = {key: settings["job"][key] for key in ("env_set", "env_copy")}
    return {key: value for key, value in settings.items() if key not in HYDRA_FILLS_IN} | {"env": env}


def interpolation_text(error: OmegaConfBaseException, tree: Mapping[str, object]) -> str:
    """Which key refers to what it cannot, with the nearest keys that there are."""
    key = str(error.full_key or "")
    written = dict(leaves(tree)).get(key.partition("[")[0])
    where = f"{key}={show(written)}" if key else "the config cannot be resolved"
    if isinstance(error, InterpolationKeyError) and (found := MISSING_KEY.search(str(error))):
        near = suggestion(nearest(found[1], paths_of(tree)))
        return f"{where}: refers to {found[1]}, and there is no such key.{near}"
    if "Environment variable" in str(error):
        return f"{where}: the environment variable is not set. A default is ${{oc.env:NAME,default}}."
    if "Recursive interpolation" in str(error):
        return f"{where}: refers to itself, directly or through other keys. Write the value in one of them."
    return f"{where}: {first_line(error)}"
