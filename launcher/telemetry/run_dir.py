"""The directory of a run: claimed once, described by files that explain it years later.

Owns its name, the claim, config.yaml, overrides.txt, env.json, result.json and the logs of the ranks. Never
overwrites another run and writes neither environment variables nor host names. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config import Config, to_dict
from launcher.errors import ConfigError, StorageError
from launcher.telemetry.files import write_json, write_text
from launcher.telemetry.status import FILE_NAME, Status

DEFAULT_ROOT = Path("outputs")
NAME_ATTEMPTS = 20  # 4 hex digits meet by chance only where hundreds of runs start in one second
PACKAGES = (
    "torch",
    "hydra-core",
    "omegaconf",
    "wandb",
    "numpy",
    "scikit-learn",
    "safetensors",
    "fp16-launcher",
)
GIT_TIMEOUT_S = 2.0
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def prepare(config: Config, overrides: Sequence[str]) -> Config:
    """Makes and claims the directory, writes what describes the run; returns the config with its path.

    Raises ConfigError where `run.dir` already holds a run, StorageError where it cannot be written.
    """
    try:
        directory = _claimed(Path(config.run.dir)) if config.run.dir else _new_default(config.recipe.name)
        resolved = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(directory)))
        write_text(directory / "config.yaml", config_yaml(resolved))
        write_text(directory / "overrides.txt", "".join(f"{override}\n" for override in overrides))
        write_json(directory / FILE_NAME, dataclasses.asdict(Status(updated=time.time())))
    except OSError as error:
        place = config.run.dir or DEFAULT_ROOT / config.recipe.name
        raise StorageError(
            f"The run's files cannot be written to {Path(place).absolute()}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}. "
            "Choose a writable place with run.dir=DIR, or make room there."
        ) from error
    return resolved


def user_shape(config: Config) -> dict[str, Any]:
    """The config as people type it: options of the model and the data set at the level of the others."""
    shape: dict[str, Any] = to_dict(config)
    for group in ("model", "data"):
        shape[group].update(shape[group].pop("options"))
    return shape


def config_yaml(config: Config) -> str:
    """`user_shape` as YAML, in the order of the schema."""
    import yaml

    text: str = yaml.safe_dump(user_shape(config), sort_keys=False, allow_unicode=True, width=110)
    return text


def write_environment(run_dir: Path, devices: Sequence[str]) -> None:
    """env.json: versions, platform, commit, and the devices of the ranks in rank order. Raises OSError."""
    write_json(
        run_dir / "env.json",
        {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processors": os.cpu_count(),
            "packages": _versions(),
            "git": _git_state(Path.cwd()),
            "devices": list(devices),
        },
    )


def write_result(run_dir: Path, result: Mapping[str, Any]) -> None:
    """result.json, on the disk before this returns. Raises OSError."""
    write_json(run_dir / "result.json", result, durable=True)


@contextlib.contextmanager
def rank_log(run_dir: Path, rank: int) -> Iterator[None]:
    """While the context lasts, the `launcher` logger also writes logs/rank<k>.log. Raises OSError."""
    directory = run_dir / "logs"
    directory.mkdir(exist_ok=True)
    handler = logging.FileHandler(directory / f"rank{rank}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger = logging.getLogger("launcher")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


def _claimed(directory: Path) -> Path:
    """The absolute path of a directory that holds no run yet and is ours from now on."""
    directory = directory.expanduser().absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(
            f"run.dir={directory} is a file; it must be a directory. Choose another name."
        ) from None
    holds_run = (directory / FILE_NAME).exists()
    try:
        if not holds_run:
            # Exclusive creation: of two runs that start here at once only one gets past this line.
            (directory / "config.yaml").touch(exist_ok=False)
    except FileExistsError:
        holds_run = True
    if holds_run:
        raise ConfigError(
            f"run.dir={directory} already holds a run; a run never writes over another. "
            "Choose another directory, or leave run.dir out for a new one under outputs/."
        )
    return directory


def _new_default(recipe: str) -> Path:
    root = DEFAULT_ROOT.absolute() / recipe
    root.mkdir(parents=True, exist_ok=True)
    for _ in range(NAME_ATTEMPTS):
        directory = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            return _claimed(directory)
    raise StorageError(
        f"{NAME_ATTEMPTS} random names in a row are taken in {root}. Give one with run.dir=DIR."
    )


def _versions() -> dict[str, str | None]:
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state(directory: Path) -> dict[str, Any] | None:
    """The commit that `directory` is at, and whether files differ from it; None outside a clone."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else bool(changes)}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
