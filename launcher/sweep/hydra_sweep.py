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
    Composer,
    Request,
    as_plain,
    check_files,
    composition_text,
    dereferenced,
    hydra_initialised,
)
from launcher.config.messages import quoted
from launcher.config.resolve import swept_keys
from launcher.config.schema import Config
from launcher.errors import ConfigError, StorageError, first_line

ROOT = Path("multirun")
SECTION = "hydra.sweep"
FILE_NAME = "multirun.yaml"
NAME_LENGTH = 100  # characters of a job's folder: file systems allow 255 bytes, a terminal shows this many


@dataclasses.dataclass(frozen=True)
class Planned:
    """A sweep whose directory exists, and the name and the overrides of each of its jobs, in order."""

    directory: Path
    names: Sequence[str]
    overrides: Sequence[tuple[str, ...]]
    master: DictConfig  # the tree of the sweep with Hydra's own section
    composer: Composer
    settings: Sequence[str]  # of hydra.sweep

    def name_of(self, number: int, lines: Sequence[str]) -> str:
        """The name of a further job, which a search has asked for. Raises ConfigError."""
        with hydra_initialised(self.composer.request):
            (name,) = job_names(self.composer, self.master, self.settings, [tuple(lines)], number)
        return name

    def save_master(self) -> None:
        """Write multirun.yaml, as Hydra does. Raises OSError."""
        OmegaConf.save(self.master, self.directory / FILE_NAME)


def planned(request: Request, configs: Sequence[Config], lines: Sequence[tuple[str, ...]]) -> Planned:
    """Make the directory of the sweep, and name the jobs with these configs and overrides.

    Raises ConfigError where two jobs have one name, StorageError where the directory cannot be made.
    """
    OmegaConf.register_new_resolver("job_directory", job_directory, replace=True)
    settings = sweep_settings(request, [config.recipe.name for config in configs])
    composer = Composer(request)
    with hydra_initialised(request):
        master = composed(request, [*settings, *request.overrides], RunMode.MULTIRUN)
        directory = Path(setting(master, "dir")).absolute()
        names = job_names(composer, master, settings, lines)
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(
                f"{SECTION}.subdir: jobs {names.index(name) + 1} and {number + 1} of the sweep would both "
                f"have the directory {name}. Name each job differently, for instance with ${{hydra.job.num}}."
            )
    return Planned(made(directory), names, lines, master, composer, settings)


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
    own = [each for each in overrides if not (each.is_hydra_override() or is_setting(each.key_or_group))]
    (jobs,) = BasicSweeper.split_arguments(own, None)
    return [tuple(lines) for lines in jobs]


def is_setting(key: str) -> bool:
    """Whether a key, or a line that begins with it, is of the sweep and not of its jobs."""
    return re.match(r"sweep[.=]|sweep$", key) is not None


def job_names(
    composer: Composer,
    master: DictConfig,
    settings: Sequence[str],
    lines: Sequence[tuple[str, ...]],
    first: int = 0,
) -> list[str]:
    """The folder of each job, as hydra.sweep.subdir names it. A name of one's own may contain any key.

    `first` is the number of the first of these jobs.
    """
    own = any(line.startswith(f"{SECTION}.subdir=") for line in settings)
    wanted = as_plain(master.hydra.sweep, resolve=False)["subdir"]
    request, names = composer.request, []
    fixed = fixed_keys(request)
    for number, of_job in enumerate(lines, first):
        dirname = get_overrides_dirname(composer.parsed(of_job), fixed, item_sep=",", kv_sep="=")
        if not own:  # only the command line can change what conf/config.yaml has
            names.append(job_directory(number, dirname))
            continue
        job = {"num": number, "id": number, "override_dirname": dirname}
        name = dereferenced(wanted, {**composer.tree(of_job), "hydra": {"job": job}})
        if name is None:
            tree = composed(request, [*settings, *of_job], RunMode.RUN)  # takes 60 ms
            with open_dict(tree):
                tree.hydra.job.update(job)
            name = setting(tree, "subdir")
        names.append(str(name))
    return names


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
    return sorted(key for key in keys if not (key.startswith("hydra") or is_setting(key)))


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
