"""Sweeps within one launch: Hydra's sweeper names the jobs, the launch runs them one after another.

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
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from launcher.config.composition import HYDRA_VERSION, Request, check_files, config_of, quoted
from launcher.config.resolve import swept_keys
from launcher.config.schema import Config
from launcher.errors import StorageError

ROOT = Path("multirun")
NAME_LENGTH = 100
RunOne = Callable[[Config, Sequence[str]], None]


def run_sweep(request: Request, recipes: Sequence[str], run_one: RunOne) -> Path | None:
    """Call `run_one(config, overrides)` for each job of a request whose jobs have all been checked.

    Returns the directory of the sweep, None if Hydra has run no job.
    `run_one` must not raise: Hydra would continue, and report only the first failure, at the end.
    """
    OmegaConf.register_new_resolver("job_directory", job_directory, replace=True)
    settings = [
        request.search_path,
        f"hydra.job.config.override_dirname.exclude_keys=[{fixed_keys(request)}]",
    ]
    if not any(line.startswith("hydra.sweep.dir=") for line in request.overrides):
        settings.append(f"hydra.sweep.dir={quoted(str(new_directory(recipes)))}")

    directories: list[Path] = []

    def task(composed: DictConfig) -> None:
        own = HydraConfig.get()
        directories.append(Path(own.sweep.dir).absolute())
        lines = OmegaConf.to_container(own.overrides.task, resolve=False)
        assert isinstance(lines, list)
        run_one(job_config(composed, own), tuple(map(str, lines)))

    call_hydra(request, ["--multirun", *settings, *request.overrides], task)
    return directories[0] if directories else None


def call_hydra(request: Request, argv: Sequence[str], task: Callable[[DictConfig], None]) -> None:
    """Call `hydra.main` with these arguments instead of sys.argv. It may raise SystemExit."""
    check_files()
    tree = str(request.directories[0])
    with arguments_replaced(argv):
        hydra.main(config_path=tree, config_name=request.config_name, version_base=HYDRA_VERSION)(task)()


def job_config(composed: DictConfig, own: HydraConf) -> Config:
    """The job's config, with the directory that Hydra made for it and the sweep's tracking group."""
    config = config_of(composed)
    group = config.tracker.group or Path(own.sweep.dir).name
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=own.runtime.output_dir),
        tracker=dataclasses.replace(config.tracker, group=group),
    )


def job_directory(number: int, overrides: str) -> str:
    """The folder of one job: its number and distinguishing overrides, in shell-safe characters."""
    plain = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", overrides)
    return f"{number}_{plain}"[:NAME_LENGTH].rstrip("_")


def fixed_keys(request: Request) -> str:
    """The overridden keys with the same value in all jobs, which are left out of job names."""
    swept = swept_keys(request)
    keys = {line.partition("=")[0] for line in request.overrides} - swept
    return ",".join(sorted(key for key in keys if not key.startswith("hydra")))


def new_directory(recipes: Sequence[str]) -> Path:
    """Create and return the unique directory multirun/<recipe>/<stamp>-<4 hex>."""
    root = (ROOT / (recipes[0] if len(set(recipes)) == 1 else "several")).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            directory = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
                return directory
    except OSError as error:
        raise StorageError(
            f"the sweep's directory {root} cannot be made: {error.strerror}. "
            "Choose a writable place with hydra.sweep.dir=DIR."
        ) from error


@contextlib.contextmanager
def arguments_replaced(argv: Sequence[str]) -> Iterator[None]:
    original = sys.argv
    sys.argv = ["launcher", *argv]
    try:
        yield
    finally:
        sys.argv = original
