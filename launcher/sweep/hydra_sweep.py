"""Sweeps within one launch: jobs named as by Hydra's sweeper, run one after another.

Owns the directory of a sweep, the names of its jobs, and the call into `hydra.main`. It does not decide which
ranks run a job or what happens when one fails: the caller's function does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hydra
from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from launcher.config.composition import (
    HYDRA_VERSION,
    Request,
    check_files,
    composition_text,
    hydra_initialised,
)
from launcher.config.messages import quoted
from launcher.config.resolve import swept_keys
from launcher.config.schema import Config
from launcher.errors import ConfigError, StorageError, first_line
from launcher.run_dir.atomic import write_json
from launcher.run_dir.records import SWEEP

ROOT = Path("multirun")
SECTION = "hydra.sweep"
FILE_NAME = "multirun.yaml"
NAME_LENGTH = 100
RunOne = Callable[[Config, Sequence[str]], None]


def run_sweep(request: Request, configs: Sequence[Config], run_one: RunOne) -> Path:
    """Call `run_one(config, overrides)` for each checked job of a request; returns the sweep's directory.

    `configs` are those of `compose_jobs`, which has composed them in the order of Hydra's sweeper: a second
    composition by `hydra.main` would take as long as the first.
    """
    OmegaConf.register_new_resolver("job_directory", job_directory, replace=True)
    settings = sweep_settings(request, [config.recipe.name for config in configs])
    with hydra_initialised(request):
        master = composed(request, [*settings, *request.overrides], RunMode.MULTIRUN)
        directory = made(Path(setting(master, "dir")).absolute())
        OmegaConf.save(master, directory / FILE_NAME)
        names = [
            subdirectory(request, master, settings, number, lines)
            for number, lines in enumerate(jobs_of(request))
        ]
    write_json(directory / SWEEP, {"jobs": names, "continue": words_to_continue(request, directory)})
    for config, name, lines in zip(configs, names, jobs_of(request), strict=True):
        run_one(placed(config, made(directory / name), directory.name), lines)
    return directory


def words_to_continue(request: Request, directory: Path) -> list[str]:
    """What to type to run the jobs of a sweep that are left; those that are done are found done."""
    place = str(directory) if re.fullmatch(r"[\w./-]+", str(directory)) else quoted(str(directory))
    own = [line for line in request.overrides if not line.startswith(f"{SECTION}.dir=")]
    tree = [] if request.config_dir is None else ["--config-dir", str(request.config_dir)]
    name = [] if request.config_name == "config" else ["--config-name", request.config_name]
    return ["-m", *own, f"{SECTION}.dir={place}", *tree, *name]


def sweep_settings(request: Request, recipes: Sequence[str]) -> list[str]:
    """Hydra's settings of the sweep that the user has not given, and those that the user has."""
    given = [line for line in request.overrides if line.startswith(f"{SECTION}.")]
    if not any(line.startswith(f"{SECTION}.dir=") for line in given):
        given.append(f"{SECTION}.dir={quoted(str(new_directory(recipes)))}")
    return [request.search_path, *given]


def composed(request: Request, lines: Sequence[str], mode: RunMode) -> DictConfig:
    """The tree as `hydra.main` composes it, with the section `hydra`. Raises ConfigError."""
    found = GlobalHydra.instance().hydra
    assert found is not None
    try:
        return found.compose_config(request.config_name, list(lines), run_mode=mode)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(composition_text(error)) from error


def setting(tree: DictConfig, key: str) -> str:
    """hydra.sweep.<key>, resolved. Raises ConfigError."""
    try:
        return str(tree.hydra.sweep[key])
    except OmegaConfBaseException as error:
        raise ConfigError(f"{SECTION}.{key} cannot be resolved: {first_line(error)}") from error


def jobs_of(request: Request) -> list[tuple[str, ...]]:
    """The overrides of each job, in the order of Hydra's sweeper."""
    overrides = OverridesParser.create().parse_overrides(list(request.overrides))
    own = [override for override in overrides if not override.is_hydra_override()]
    (jobs,) = BasicSweeper.split_arguments(own, None)
    return [tuple(lines) for lines in jobs]


def subdirectory(
    request: Request, master: DictConfig, settings: Sequence[str], number: int, lines: Sequence[str]
) -> str:
    """The folder of one job, as hydra.sweep.subdir names it. A name of one's own may contain any key."""
    if any(line.startswith(f"{SECTION}.subdir=") for line in settings):
        master = composed(request, [*settings, *lines], RunMode.RUN)
    overrides = OverridesParser.create().parse_overrides(list(lines))
    with open_dict(master):
        job = master.hydra.job
        job.id = job.num = number
        job.override_dirname = get_overrides_dirname(overrides, fixed_keys(request), item_sep=",", kv_sep="=")
    return setting(master, "subdir")


def placed(config: Config, directory: Path, sweep: str) -> Config:
    """The job's config, with its directory and, unless it has another, the sweep's tracking group."""
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=str(directory)),
        tracker=dataclasses.replace(config.tracker, group=config.tracker.group or sweep),
    )


def call_hydra(request: Request, argv: Sequence[str], task: Callable[[DictConfig], None]) -> None:
    """Call `hydra.main` with these arguments instead of sys.argv. It may raise SystemExit."""
    check_files()
    tree = str(request.directories[0])
    with arguments_replaced(argv):
        hydra.main(config_path=tree, config_name=request.config_name, version_base=HYDRA_VERSION)(task)()


def job_directory(number: int, overrides: str) -> str:
    """The folder of one job: its number and distinguishing overrides, in shell-safe characters."""
    plain = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", overrides)
    return f"{number}_{plain}"[:NAME_LENGTH].rstrip("_")


def fixed_keys(request: Request) -> list[str]:
    """The overridden keys with the same value in all jobs, which are left out of job names."""
    swept = swept_keys(request)
    keys = {line.partition("=")[0] for line in request.overrides} - swept
    return sorted(key for key in keys if not key.startswith("hydra"))


def new_directory(recipes: Sequence[str]) -> Path:
    """Create and return the unique directory multirun/<recipe>/<stamp>-<4 hex>."""
    root = made((ROOT / (recipes[0] if len(set(recipes)) == 1 else "several")).absolute())
    while True:
        directory = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        with contextlib.suppress(FileExistsError):
            return made(directory, exist_ok=False)


def made(directory: Path, exist_ok: bool = True) -> Path:
    """Create the directory and return it. Raises StorageError, and FileExistsError if that is not ok."""
    try:
        directory.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(
            f"the sweep's directory {directory} cannot be made: {error.strerror}. "
            "Choose a writable place with hydra.sweep.dir=DIR."
        ) from error
    return directory


@contextlib.contextmanager
def arguments_replaced(argv: Sequence[str]) -> Iterator[None]:
    original = sys.argv
    sys.argv = ["launcher", *argv]
    try:
        yield
    finally:
        sys.argv = original
