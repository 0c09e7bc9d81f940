"""Checkpoints: published atomically, verified before use, chosen once for all ranks.

A checkpoint is a directory `step-00000100` of safetensors and JSON. Reading one executes nothing.
"""

from launcher.checkpoint.async_writer import Due, Report, Writer
from launcher.checkpoint.catalog import resume
from launcher.checkpoint.format import load, publish
from launcher.checkpoint.host_memory import HostMemory
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
    "Snapshot",
    "Staged",
    "Surroundings",
    "Writer",
    "load",
    "publish",
    "restore",
    "resume",
    "stage",
]
