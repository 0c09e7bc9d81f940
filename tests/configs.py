"""Configs for tests, from the same YAML that users get."""

from __future__ import annotations

from functools import cache

from launcher.config.resolve import Request, compose_jobs
from launcher.config.schema import Config


@cache
def composed(*overrides: str) -> Config:
    """What `recipe=resnet18` and these overrides resolve to; run.dir is empty."""
    (config,) = compose_jobs(Request(("recipe=resnet18", *overrides)))
    return config
