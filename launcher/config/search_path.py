"""Trees of configs beyond --config-dir: `hydra.searchpath`, as directories.

Owns the parsing of its entries: a path, file://DIR or pkg://PACKAGE. A package is located on the module path
and never imported, because its __init__ would execute.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from launcher.config.environment_values import interpolated, resolver_problem
from launcher.config.messages import show
from launcher.errors import ConfigError

KEY = "hydra.searchpath"


def directories_of(entries: object) -> list[Path]:
    """The directory of each entry. Raises ConfigError for an invalid entry."""
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(
            f"{KEY}={show(entries)}: must be a list of directories: [file:///DIR,pkg://PACKAGE]."
        )
    return [_directory_of(entry) for entry in entries]


def _directory_of(entry: str) -> Path:
    if problem := resolver_problem(entry):
        raise ConfigError(f"{KEY}={entry}: {problem}")
    text = str(interpolated(KEY, entry))
    scheme, rest = text.split("://", 1) if "://" in text else ("file", text)
    if scheme not in ("file", "pkg"):
        raise ConfigError(f"{KEY}={entry}: must begin with file:// or pkg://, or be a directory.")
    found = _package_directory(rest) if scheme == "pkg" else Path(os.path.expanduser(rest))
    if found is None or not os.path.isdir(found):
        raise ConfigError(f"{KEY}={entry}: there is no such {'package' if scheme == 'pkg' else 'directory'}.")
    return found.absolute()


def _package_directory(name: str) -> Path | None:
    """The folder of a package such as mine.conf, found without executing any of it."""
    locations: Sequence[str] | None = None  # of the package that has the next one; None: the module path
    for full in itertools.accumulate(name.replace("/", ".").split("."), "{}.{}".format):
        spec = PathFinder.find_spec(full, locations)
        if spec is None or not spec.submodule_search_locations:
            return None
        locations = list(spec.submodule_search_locations)
    return Path(locations[0]) if locations else None
