"""Trees of configs beyond --config-dir: `hydra.searchpath`, as directories.

Owns the parsing of its entries: a path, file://DIR or pkg://PACKAGE. A package is located on the module path
and never imported, because its __init__ would execute.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from launcher.config.environment_values import resolver_problem
from launcher.errors import ConfigError

KEY = "hydra.searchpath"


def directories_of(entries: object) -> list[Path]:
    """The directory of each entry. Raises ConfigError for an invalid entry."""
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"{KEY}={entries}: must be a list of directories: [file:///DIR,pkg://PACKAGE].")
    return [_directory_of(entry) for entry in entries]


def _directory_of(entry: str) -> Path:
    if problem := resolver_problem(entry):
        raise ConfigError(f"{KEY}={entry}: {problem}")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = str(OmegaConf.create({"entry": entry}).entry)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{KEY}={entry}: cannot be resolved: {error.msg}.") from error
    scheme, has_scheme, rest = text.partition("://")
    if has_scheme and scheme not in ("file", "pkg"):
        raise ConfigError(f"{KEY}={entry}: must begin with file:// or pkg://, or be a directory.")
    found = _package_directory(rest) if scheme == "pkg" and has_scheme else Path(rest if has_scheme else text)
    if found is None or not os.path.isdir(found.expanduser()):
        raise ConfigError(f"{KEY}={entry}: there is no such {'package' if scheme == 'pkg' else 'directory'}.")
    return found.expanduser().absolute()


def _package_directory(name: str) -> Path | None:
    """The folder of a package such as mine.conf, found without executing any of it."""
    locations: Sequence[str] | None = None
    full = ""
    for part in name.replace("/", ".").split("."):
        full = f"{full}.{part}" if full else part
        if not part.isidentifier():
            return None
        spec = PathFinder.find_spec(full, locations)
        if spec is None or spec.submodule_search_locations is None:
            return None
        locations = list(spec.submodule_search_locations)
    return Path(locations[0]) if locations else None
