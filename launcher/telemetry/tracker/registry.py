"""Finds trackers by name: those of the project, and those that a recipe file registers.

Owns the decorator. Imports no tracker's library: the modules do, where they are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from launcher.config.constraints import TRACKERS
from launcher.config.messages import install_line, nearest, suggestion
from launcher.config.schema import TrackerConfig
from launcher.errors import ConfigError
from launcher.telemetry.tracker.protocol import Tracker

_OWN: dict[str, type[Tracker]] = {}
# What a tracker of this name imports, and as which package pip knows it.
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow-skinny"}
CLASSES = {"tensorboard": "TensorboardTracker", "mlflow": "MlflowTracker"}  # in <name>_tracker


def tracker(name: str) -> Callable[[type[Tracker]], type[Tracker]]:
    """Offers a class without arguments under `name` (the config's `tracker.name`)."""
    if name in TRACKERS:
        raise ConfigError(f'@tracker("{name}"): the launcher has a tracker of that name. Choose another.')

    def register(kind: type[Tracker]) -> type[Tracker]:
        _OWN[name] = kind
        return kind

    return register


def make(name: str) -> Tracker:
    """A new tracker of a known name, other than wandb, which takes options."""
    if name in _OWN:
        return _OWN[name]()
    module = importlib.import_module(f"launcher.telemetry.tracker.{name}_tracker")
    made: Tracker = getattr(module, CLASSES[name])()
    return made


def refuse_unknown(config: TrackerConfig) -> None:
    """Raise ConfigError for a name that nothing registers. Call it once the recipe file is loaded."""
    for name in config.names:
        known = (*TRACKERS, *_OWN)
        if name not in known:
            raise ConfigError(
                f"tracker.name={name}: must be one of {', '.join(known)}, or one that the recipe file "
                f'registers with @tracker("{name}").{suggestion(nearest(name, known))}'
            )


def refuse_missing(config: TrackerConfig) -> None:
    """Raise ConfigError for a tracker whose library is not installed, with the line that installs it."""
    from importlib.util import find_spec

    for name in config.names:
        if name in PACKAGES and find_spec(name) is None:
            package = PACKAGES[name]
            raise ConfigError(
                f"tracker.name={name}: needs the package {package}, which is not installed. "
                f"Install it with: {install_line(package)}"
            )
