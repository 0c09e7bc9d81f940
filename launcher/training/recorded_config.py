"""The run's config.yaml with what the run has found out, so that a new run can start with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.config.schema import Config
from launcher.run_dir.records import write_config


def asked(config: Config) -> dict[str, Any]:
    """The user's values of what `RecordedConfig` may replace, by key, so that reports compare runs by them.

    Without model.weights_sha256: weights of other content are another start.
    """
    return {
        "data.micro_batch": config.data.micro_batch,
        "precision.fp32_modules": list(config.precision.fp32_modules),
    }


class RecordedConfig:
    """Writes config.yaml again, on rank 0; a failure is a warning. A resume reads its checkpoint instead."""

    def __init__(self, config: Config, is_leader: bool, warn: Callable[[str], None]) -> None:
        self._config = config
        self._is_leader = is_leader
        self._warn = warn

    def change(self, **sections: Any) -> None:
        """Replace sections of the config that was recorded so far."""
        self._config = dataclasses.replace(self._config, **sections)
        if not self._is_leader:
            return
        try:
            write_config(Path(self._config.run.dir), self._config)
        except OSError as error:
            self._warn(f"config.yaml lacks what the run has found out: {error}")
