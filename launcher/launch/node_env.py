"""The machines of a run: which of them this process is, as the command line or a scheduler says.

Owns the reading of launch.nnodes, launch.node_rank and launch.rdzv_endpoint before there is a config, which
only node 0 composes, and the refusal to train on one machine where a scheduler says that there are more.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from launcher.config.messages import command_name
from launcher.config.schema import LaunchConfig
from launcher.distributed.env import NODE, LaunchEnv
from launcher.errors import ConfigError, PreflightError, counted
from launcher.launch import slurm

# Set by what starts one process on each of several machines; of mpirun it is the number of processes.
NODE_COUNT_VARS = (
    "SLURM_STEP_NUM_NODES",  # before those of its job; of one task srun makes a step of one node
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "PET_NNODES",
    "SKYPILOT_NUM_NODES",
    "OMPI_COMM_WORLD_SIZE",
)
USAGE = "launch.nnodes=N launch.node_rank=K launch.rdzv_endpoint=HOST:PORT"


def node_env(words: Sequence[str], environ: MutableMapping[str, str]) -> LaunchEnv:
    """This process as one of the parents of a run on several machines; LaunchEnv() if there is only one.

    `words` are overrides. Sets MASTER_ADDR and MASTER_PORT in `environ`, where the parents meet. Raises
    ConfigError for a number of machines without the place of this one, or without an endpoint.
    """
    nnodes = given(words, "nnodes")
    rank = given(words, "node_rank") or environ.get("SLURM_NODEID", "")
    if not nnodes.isdecimal() or int(nnodes) < 2:
        if given(words, "node_rank").isdecimal() and int(rank) > 0:
            raise ConfigError(f"launch.node_rank={rank} without launch.nnodes: give {USAGE}.")
        return LaunchEnv()
    if not rank.isdecimal() or int(rank) >= int(nnodes):
        raise ConfigError(
            f"launch.nnodes={nnodes} with launch.node_rank={rank or 'auto'}: give launch.node_rank=0 on the "
            f"machine of launch.rdzv_endpoint, and 1 to {int(nnodes) - 1} on the others."
        )
    tasks = environ.get("SLURM_STEP_NUM_TASKS", nnodes)
    if tasks != nnodes and not given(words, "node_rank"):
        raise ConfigError(
            f"launch.nnodes={nnodes}, but srun has started {counted(int(tasks), 'task')}: it must start one "
            f"on each node. Give srun, or sbatch, --nodes={nnodes} --ntasks-per-node=1."
        )
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = endpoint_of(words, environ)
    return LaunchEnv(rank=int(rank), world_size=int(nnodes), role=NODE)


def planned_launch(wish: LaunchConfig, launch: LaunchEnv) -> LaunchEnv:
    """The launch of a run that is not started: node 0 of as many machines as `node_env` would find.

    Without the endpoint and the number of this machine, which only a run needs.
    """
    if launch.has_external_launcher or wish.nnodes in ("auto", 1):
        return launch
    return LaunchEnv(world_size=int(wish.nnodes), role=NODE)


def endpoint_of(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Address and port at which the machines meet. Raises ConfigError where they are not given."""
    endpoint = given(words, "rdzv_endpoint")
    if not endpoint and "SLURM_STEP_NODELIST" in environ:
        endpoint = ":".join(slurm.endpoint(environ))
    address, _, port = endpoint.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"launch.rdzv_endpoint={endpoint or 'null'} with launch.nnodes: it must be HOST:PORT, the "
            "same on all machines: an address of node 0 that the others reach, and a port that is free there."
        )
    return address.strip("[]"), port


def check_all_nodes_started(wish: LaunchConfig, launch: LaunchEnv, environ: Mapping[str, str]) -> None:
    """Raise PreflightError for a run of one machine where a scheduler says that there are more.

    `launch.nnodes=1` allows it. Raises ConfigError if the config has more machines than this launch.
    """
    if launch.num_machines > 1 or wish.nnodes == 1:
        return
    if wish.nnodes != "auto":
        raise ConfigError(
            f"launch.nnodes={wish.nnodes}, but this process was started for one machine. Give {USAGE} on "
            "the command line of each machine: all but node 0 read it there, before they have a config."
        )
    for key in NODE_COUNT_VARS:
        # Of MIN:MAX torchrun may have started the least; without it there would be one of the most.
        said = environ.get(key, "").split(":")[0 if launch.has_external_launcher else -1]
        here = launch.world_size if key.startswith("OMPI") else 1
        if said.isdecimal() and int(said) > here:
            raise PreflightError(
                f"{key}={said} in the environment says that there are more, but this one would train "
                f"alone. Start one on each machine: {command_name()} ... {USAGE}, or torchrun with --nnodes. "
                "To train on one machine all the same, give launch.nnodes=1."
            )


def given(words: Sequence[str], key: str) -> str:
    """The value of `launch.<key>` among overrides, of which the last counts; empty if there is none."""
    values = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"launch.{key}=")]
    return values[-1].strip("'\"") if values and values[-1] not in ("auto", "null") else ""
