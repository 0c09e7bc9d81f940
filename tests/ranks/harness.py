"""Run a function on several real processes that form a Gloo group.

The processes are forked from one server that has imported torch once, so two ranks take well under two
seconds. Each has one thread, warnings as errors, and a deadline; a failing rank is reported with its
traceback, and no process outlives the call.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.nn.functional",
    "launcher.worker",
    "launcher.launch.agent",
    "launcher.config.resolve",
    "launcher.sweep.prepare",
    "launcher.cli",
    "PIL.ImageDraw",
    "PIL.ImageFont",
    "pytest",  # of the test's module, which each rank imports
    "torch._dynamo",  # of torch's optimizers and of compilation: 2 s of each rank otherwise
]


def forkserver() -> ForkServerContext:
    """Processes forked from one server that has imported what a worker and its parent import.

    The first to fork decides on what the server imports, so every harness forks from here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def leave_out_pictures() -> None:
    """In a process that runs the launcher: no plots and no report, which cost more than its short run."""
    from launcher.trainer import results

    results.write_page = lambda run_dir, telemetry: None


class RankFailure(AssertionError):
    """Some rank raised, died or did not finish in time; the text says which and why."""


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """Call `work(env, *args)` on each rank; return what each returned, by rank.

    `work` must be a function at the top level of a module. `env` is a `WorkerEnv` of
    `launcher.distributed` whose group is open (None for a world of one). Tensors may be returned.
    """
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_be_a_rank, args=(rank, world_size, folder, pipes[rank][1], work, args), daemon=True
            )
            for rank in range(world_size)
        ]
        try:
            for process, (_, theirs) in zip(processes, pipes, strict=True):
                process.start()
                theirs.close()
            return _collect([ours for ours, _ in pipes], timeout_s)
        finally:
            for process, (ours, _) in zip(processes, pipes, strict=True):
                process.kill()
                process.join()
                process.close()
                ours.close()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    """The results by rank. The first failure ends the wait: the other ranks may hang because of it."""
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankFailure(f"ranks {missing} did not finish within {timeout_s} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failed, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankFailure(f"rank {rank} died without a word") from None
            if failed:
                raise RankFailure(f"rank {rank} raised:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(len(pipes))]


def _be_a_rank(
    rank: int, world_size: int, folder: str, pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    from launcher.distributed.env import WorkerEnv

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        group = None
        if world_size > 1:
            store = dist.FileStore(str(Path(folder, "store")), world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
            )
            group = dist.group.WORLD
        env = WorkerEnv(rank, world_size, rank, world_size, torch.device("cpu"), group)
        result = work(env, *args)
        pipe.send_bytes(pickle.dumps((False, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((True, traceback.format_exc())))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
