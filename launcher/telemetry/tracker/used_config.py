"""The config of a run as trackers show it: with what its recipe really uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from launcher.config.schema import DataConfig, ModelConfig
from launcher.telemetry.stream import Record


def used_config(config: Mapping[str, Any], start: Record) -> dict[str, Any]:
    """The config, with the names of the model and data that the `start` event names.

    Options of a choice that the recipe does not use are omitted.
    """
    kept = {
        group: {field.name for field in fields(kind)}
        for group, kind in (("model", ModelConfig), ("data", DataConfig))
    }
    return dict(config) | {
        group: {key: value for key, value in config[group].items() if key in kept[group]}
        | {"name": start[group]}
        for group in kept
        if start.get(group) and group in config and start[group] != config[group].get("name")
    }
