"""The files that document a run.

Owns config.yaml, overrides.txt, env.json, result.json and the logs of the ranks. Writes neither environment
variables nor host names. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.config.codec import encoded
from launcher.config.schema import Config, to_dict
from launcher.errors import listed
from launcher.run_dir.atomic import write_json, write_text
from launcher.run_dir.result import Failure, Result
from launcher.run_dir.status import FILE_NAME, Status, mark_ended

CONFIG, OVERRIDES, ENVIRONMENT = "config.yaml", "overrides.txt", "env.json"
METRICS, RESULT, REPORT = "metrics.jsonl", "result.json", "report.html"
SWEEP = "sweep.json"  # of a sweep: its jobs, and the words that continue it
JOB = "job.json"  # of a job of a sweep: its config and overrides, from which any process can start it
LOGS, CHECKPOINTS = "logs", "checkpoints"
TRACKERS = "trackers"  # files of the other trackers, in a folder each
PICTURES = "pictures"  # of a recipe's own
MODEL = "model"  # what predicting needs besides the weights
PACKAGES = (
    "torch",
    "hydra-core",
    "omegaconf",
    "wandb",
    "numpy",
    "safetensors",
    "fp16-launcher",
)
GIT_TIMEOUT_S = 2.0  # looking through a large tree on a network disk takes longer: the run does not wait
SHOWN_LOGS = 3
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def write_metadata(config: Config, overrides: Sequence[str]) -> None:
    """Write the first status.json, config.yaml and overrides.txt of the run. Raises OSError."""
    directory = Path(config.run.dir)
    write_json(directory / FILE_NAME, dataclasses.asdict(Status(updated=time.time())))  # it marks a run
    write_config(directory, config)
    write_text(directory / OVERRIDES, "".join(f"{override}\n" for override in overrides))


def write_config(directory: Path, config: Config) -> None:
    """Write config.yaml; it is on disk before this returns. Raises OSError."""
    write_text(directory / CONFIG, config_yaml(config), durable=True)


def foreign_to_a_run(directory: Path) -> list[str]:
    """The files in a directory without a run that one would write over."""
    files = (CONFIG, OVERRIDES, ENVIRONMENT, FILE_NAME, METRICS, RESULT, REPORT)
    return [name for name in files if (directory / name).exists()]


def config_yaml(config: Config) -> str:
    """The config as YAML, in the order of the schema."""
    import yaml

    text: str = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=110)
    return text


def write_environment(run_dir: Path, devices: Sequence[str]) -> None:
    """Write env.json: versions, platform, commit, and the ranks' devices in rank order. Raises OSError."""
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": {package: _version(package) for package in PACKAGES},
        "git": _git_commit(Path.cwd()),
        "devices": list(devices),
    }
    write_json(run_dir / ENVIRONMENT, environment)


def write_result(run_dir: Path, result: Result | Failure) -> None:
    """Write result.json; it is on disk before this returns. Raises OSError."""
    write_json(run_dir / RESULT, encoded(result), durable=True)


def write_failure(run_dir: Path, failure: Failure, steps_done: int = 0) -> None:
    """Write result.json and status.json of a run that is not done; an OSError leaves the file as it was.

    `steps_done` is needed where rank 0, which writes status.json, may have been killed.
    """
    with contextlib.suppress(OSError):
        write_result(run_dir, failure)
    with contextlib.suppress(OSError):
        mark_ended(run_dir / FILE_NAME, failure.state, failure.exit, steps_done)


def log_path(run_dir: Path, rank: int) -> Path:
    """The log of a rank: logs/rank<k>.log."""
    return run_dir / LOGS / f"rank{rank}.log"


def logs_of_failure(run_dir: Path, rank: int, world_size: int) -> str:
    """The log of a rank that failed, and those of the other ranks, as the end of a sentence."""
    others = [log_path(run_dir, other) for other in range(world_size) if other != rank]
    more = f"; logs of the other ranks: {listed(others, SHOWN_LOGS)}" if others else ""
    return f"{log_path(run_dir, rank)}{more}"


def stacks_path(run_dir: Path, rank: int) -> Path:
    """The stacks of a rank of a stalled run: logs/stacks-rank<k>.txt."""
    return run_dir / LOGS / f"stacks-rank{rank}.txt"


@contextlib.contextmanager
def rank_log(run_dir: Path, rank: int, level: str = "info") -> Iterator[None]:
    """Within the context, the `launcher` logger also writes logs/rank<k>.log. Raises OSError.

    `level` is the least severe that is written: debug, info, warning or error.
    """
    (run_dir / LOGS).mkdir(exist_ok=True)
    handler = _LogFile(log_path(run_dir, rank), encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger = logging.getLogger("launcher")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk must not hide the error that ends the run
            handler.close()


class _LogFile(logging.FileHandler):
    """Warns once of records that cannot be written: a traceback for each would hide the run's own lines."""

    _is_complete = True

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif self._is_complete:
            self._is_complete = False
            text = f"warning: {self.baseFilename} is incomplete: {error.strerror}\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode(errors="backslashreplace"))


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit(directory: Path) -> str | None:
    """The commit of the clone at `directory`, with "-dirty" if files differ from it; None outside a clone."""
    command = ["git", "-C", str(directory), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
