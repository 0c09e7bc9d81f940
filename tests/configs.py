"""Configs for tests, from the same YAML that users get."""

from __future__ import annotations

from functools import cache

from launcher.config import Config
from launcher.jobs import Request, compose_jobs


@cache
def composed(*overrides: str) -> Config:
    """What `recipe=resnet18` and these overrides resolve to; run.dir is empty."""
    (config,) = compose_jobs(Request(("recipe=resnet18", *overrides)))
    return config
