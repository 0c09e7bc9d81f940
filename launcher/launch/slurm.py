"""What Slurm says in the environment of a task of srun: which rank it is, and where the ranks meet.

Owns every read of SLURM_ variables for this, and runs no command of Slurm: a container may have none. Imports
no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Below the ports that Linux gives to outgoing connections, which begin at 32768.
FIRST_PORT, NUM_PORTS = 15000, 15000


def torchrun_env_from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK and the other variables of torchrun, for a task of srun; empty unless there are several tasks.

    MASTER_ADDR and MASTER_PORT are left as they are where they are set. Raises KeyError where one of srun's
    variables is missing, as in a container that does not pass them on.
    """
    # mpirun starts its processes from one task of srun per node, and each agent of wandb runs of its own.
    others = {"RANK", "OMPI_COMM_WORLD_SIZE", "WANDB_SWEEP_PARAM_PATH"}
    if int(environ.get("SLURM_STEP_NUM_TASKS") or 1) < 2 or others & environ.keys():
        return {}
    address, port = endpoint(environ)
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(len(environ["SLURM_GTIDS"].split(","))),  # the tasks on this node
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def endpoint(environ: Mapping[str, str]) -> tuple[str, str]:
    """Address and port at which the tasks of a step meet: its first node, and a port by the job's number.

    So steps that share a node have different ports. Each task of an array is a job with its own number.
    MASTER_ADDR and MASTER_PORT replace them where they are set.
    """
    number = int(environ["SLURM_JOB_ID"]) * 31 + int(environ["SLURM_STEP_ID"])
    address = environ.get("MASTER_ADDR") or first_node(environ["SLURM_STEP_NODELIST"])
    return address, environ.get("MASTER_PORT") or str(FIRST_PORT + number % NUM_PORTS)


def first_node(nodes: str) -> str:
    """The first name in a list of Slurm's, such as `gpu[001-004,007],login`."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0]
