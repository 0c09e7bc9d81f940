"""Whether the ranks that meet at one MASTER_PORT were started together.

Two launches that share an address and a port would otherwise train with each other's ranks. Each rank
compares its arguments and its job's id with those of rank 0, and claims its number. Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.distributed.env import LaunchEnv
from launcher.distributed.store import awaited
from launcher.errors import PreflightError

if TYPE_CHECKING:
    import torch.distributed as dist

# Set by schedulers, the same for all ranks of a job.
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def origin(arguments: Sequence[str]) -> dict[str, object]:
    """What tells the ranks of one launch from those of another, and this process from others."""
    ids = {key: os.environ[key] for key in JOB_IDS if key in os.environ}
    return {
        "arguments": list(arguments),
        "job": ids,
        "host": socket.gethostname(),
        "process": os.getpid(),
    }


def join_launch(store: dist.Store, launch: LaunchEnv, arguments: Sequence[str], wait_s: float) -> None:
    """Tell rank 0 that this rank is here; raises PreflightError if one of the two is of another launch."""
    own, noun = origin(arguments), launch.noun
    leader = json.loads(awaited(store, "leader", wait_s, launch, "the job", None))
    if differences := _differences(own, leader, noun):
        raise PreflightError(
            f"{launch.name} and the {noun} 0 that it found at {launch.meeting_place} (process "
            f"{leader['process']} on {leader['host']}) are not of one launch: {'; '.join(differences)}. Give "
            f"all {noun}s of a launch the same arguments, and each launch a port of its own."
        )
    claim(store, launch, f"here/{launch.rank}", own)


def claim(store: dist.Store, launch: LaunchEnv, key: str, own: Mapping[str, Any]) -> None:
    """Record this process under a key; raises PreflightError if another process has."""
    first = json.loads(store.compare_set(key, "", json.dumps(own)))
    if first != own:
        number = "launch.node_rank" if launch.is_node else "RANK"
        raise PreflightError(
            f"another process is {launch.name} already at {launch.meeting_place}: {first['process']} on "
            f"{first['host']}. Give each process of a launch a {number} of its own, and each launch a port "
            "of its own."
        )


def _differences(own: Mapping[str, Any], leader: Mapping[str, Any], noun: str) -> list[str]:
    given, theirs = Counter(own["arguments"]), Counter(leader["arguments"])
    only = (given - theirs, f"this {noun}"), (theirs - given, f"{noun} 0")
    found = [f"only {who} was given {' '.join(words)}" for words, who in only if words]
    ids = ((key, own["job"].get(key), leader["job"].get(key)) for key in JOB_IDS)
    return found + [
        f"{key} is {here} here and {there} on {noun} 0" for key, here, there in ids if here != there
    ]
