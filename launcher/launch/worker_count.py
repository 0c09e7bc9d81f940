"""How many workers a run gets, and whether this process may start them.

Owns the reading of `launch.nproc` and the count of GPUs, without initialising CUDA: a process that has done
so cannot fork workers that use it. Imports no torch.
"""

from __future__ import annotations

import ctypes
import functools
import os

from launcher.config.schema import Config, LaunchConfig
from launcher.distributed.env import LaunchEnv
from launcher.errors import ConfigError, PreflightError, counted
from launcher.os.cuda_driver import ask_driver

CPU_WORKERS = "LAUNCHER_CPU_WORKERS"  # scripts/run sets it: the workers of launch.nproc=auto without a GPU


def num_workers(wish: LaunchConfig, launch: LaunchEnv) -> int | None:
    """The number of workers to start; None if this process is a worker itself.

    torchrun or a scheduler decides the number then. Raises PreflightError for more workers than GPUs.
    """
    if launch.has_external_launcher:
        return None
    num_gpus = count_gpus()
    if wish.nproc != "auto":
        if num_gpus and wish.nproc > num_gpus:
            raise PreflightError(
                f"launch.nproc={wish.nproc} asks for more workers than the {counted(num_gpus, 'GPU')} that "
                f"this process may use. Ask for at most {num_gpus}, or hide them with CUDA_VISIBLE_DEVICES= "
                "to train on the CPU."
            )
        return wish.nproc if wish.nproc > 1 or wish.max_restarts > 0 else None
    if not num_gpus and (workers_of_script := os.environ.get(CPU_WORKERS)):
        return int(workers_of_script)
    return max(1, num_gpus) if num_gpus >= 2 or wish.max_restarts > 0 else None


def num_ranks(wish: LaunchConfig, launch: LaunchEnv, workers: int | None = None) -> int:
    """The number of ranks of all machines. Raises as `num_workers`.

    `workers` is how many a job of a sweep gets; None for a run that gets what this machine has.
    """
    workers = workers or num_workers(wish, launch)
    if launch.is_node:
        return (workers or 1) * launch.world_size
    return workers or launch.world_size


def refuse_small_batch(config: Config, launch: LaunchEnv, workers: int | None = None) -> None:
    """Raise ConfigError for an update of fewer samples than ranks, before any worker starts.

    `workers` as in `num_ranks`.
    """
    ranks = num_ranks(config.launch, launch, workers)
    if config.data.batch_size < ranks:
        raise ConfigError(
            f"data.batch_size={config.data.batch_size} is less than the number of ranks, {ranks}: each rank "
            "needs a sample in every full update. Raise data.batch_size to at least that number, or start "
            "fewer ranks."
        )


def count_gpus() -> int:
    """The number of GPUs visible to a CUDA program."""
    return len(visible_gpus())


@functools.cache
def visible_gpus() -> tuple[str, ...]:
    """The UUIDs of the GPUs visible to a CUDA program, in its order.

    Empty where the driver does not start: the worker refuses to train on the CPU then.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    # Not before: they take 40 ms.
    from concurrent.futures import ProcessPoolExecutor
    from importlib import metadata
    from multiprocessing import get_context

    if metadata.version("torch").endswith("+cpu"):
        return ()
    # In a child, which ends at once: CUDA initialised here could not be used in workers that are forked.
    with ProcessPoolExecutor(1, get_context("fork")) as child:
        return child.submit(ask_driver).result().uuids
