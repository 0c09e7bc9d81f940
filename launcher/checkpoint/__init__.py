"""Checkpoints: published whole or not at all, verified before use, chosen once for all ranks.

A checkpoint is a directory `step-00000100` of safetensors and JSON. Nothing here executes what it reads.
"""

from launcher.checkpoint.choice import Agreement, Resumption, agree, resume
from launcher.checkpoint.files import load, publish
from launcher.checkpoint.host_memory import HostMemory
from launcher.checkpoint.manifest import verify
from launcher.checkpoint.shelf import best_intact, newest_intact, retain
from launcher.checkpoint.snapshot import (
    Identity,
    Metric,
    Origin,
    Progress,
    Snapshot,
    Staged,
    restore,
    stage,
    take,
)
from launcher.checkpoint.writer import Due, Report, Writer

__all__ = [
    "Agreement",
    "Due",
    "HostMemory",
    "Identity",
    "Metric",
    "Origin",
    "Progress",
    "Report",
    "Resumption",
    "Snapshot",
    "Staged",
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
    "take",
    "verify",
]
