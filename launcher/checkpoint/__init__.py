"""Checkpoints: published atomically, verified before use, chosen once for all ranks.

A checkpoint is a directory `step-00000100` of safetensors and JSON. Reading one executes nothing.
"""

from launcher.checkpoint.async_writer import Due, Report, Writer
from launcher.checkpoint.catalog import Resumption, agree, best_intact, newest_intact, resume, retain
from launcher.checkpoint.format import load, publish
from launcher.checkpoint.host_memory import HostMemory
from launcher.checkpoint.manifest import verify
from launcher.checkpoint.snapshot import (
    Compared,
    Identity,
    Origin,
    Progress,
    Snapshot,
    Staged,
    Surroundings,
    restore,
    stage,
)

__all__ = [
    "Compared",
    "Due",
    "HostMemory",
    "Identity",
    "Origin",
    "Progress",
    "Report",
    "Resumption",
    "Snapshot",
    "Staged",
    "Surroundings",
    "Writer",
    "agree",
    "best_intact",
    "load",
    "newest_intact",
    "publish",
    "restore",
    "resume",
    "retain",
    "stage",
    "verify",
]
