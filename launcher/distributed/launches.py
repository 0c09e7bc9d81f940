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

from launcher.distributed.store import awaited
from launcher.errors import PreflightError

if TYPE_CHECKING:
    import torch.distributed as dist

# Set by schedulers, the same for all ranks of a job.
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def meeting_place() -> str:
    """Where the ranks of this launch meet, as part of a sentence."""
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']} and MASTER_PORT={os.environ['MASTER_PORT']}"


def origin(arguments: Sequence[str]) -> dict[str, object]:
    """What tells the ranks of one launch from those of another, and this process from others."""
    ids = {key: os.environ[key] for key in JOB_IDS if key in os.environ}
    return {
        "arguments": list(arguments),
        "job": ids,
        "host": socket.gethostname(),
        "process": os.getpid(),
    }


def join_launch(store: dist.Store, rank: int, arguments: Sequence[str], wait_s: float) -> None:
    """Tell rank 0 that this rank is here; raises PreflightError if one of the two is of another launch."""
    own = origin(arguments)
    leader = json.loads(awaited(store, "leader", wait_s, rank, "the job", None))
    if differences := _differences(own, leader):
        raise PreflightError(
            f"rank {rank} and the rank 0 that it found at {meeting_place()} (process {leader['process']} on "
            f"{leader['host']}) are not of one launch: {'; '.join(differences)}. Give all ranks of a launch "
            "the same arguments, and each launch a MASTER_PORT of its own."
        )
    first = json.loads(store.compare_set(f"here/{rank}", "", json.dumps(own)))
    if first != own:
        raise PreflightError(
            f"another process is rank {rank} already at {meeting_place()}: {first['process']} on "
            f"{first['host']}. Give each process of a launch a RANK of its own, and each launch a "
            "MASTER_PORT of its own."
        )


def _differences(own: Mapping[str, Any], leader: Mapping[str, Any]) -> list[str]:
    found = []
    given, theirs = Counter(own["arguments"]), Counter(leader["arguments"])
    for words, who in ((given - theirs, "this rank"), (theirs - given, "rank 0")):
        if words:
            found.append(f"only {who} was given {' '.join(words)}")
    ids = ((key, own["job"].get(key), leader["job"].get(key)) for key in JOB_IDS)
    return found + [
        f"{key} is {here} here and {there} on rank 0" for key, here, there in ids if here != there
    ]
