"""What a forked worker does before and after its part of the job.

Owns the ties to the parent: a worker is killed with it, blocks signals until it can handle them, writes its
stacks on request, and records how it ended where the parent reads it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from launcher import worker
from launcher.config.schema import Config
from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import exit_record
from launcher.distributed.heartbeat import Heartbeats
from launcher.distributed.store import open_store, set_tcp_timeouts
from launcher.os.lifetime import die_with_parent, kill_children
from launcher.os.signals import DUMP_STACKS_SIGNAL, HANDLED
from launcher.os.stdio import flush
from launcher.run_dir.records import stacks_path


@dataclass(frozen=True)
class WorkerSpec:
    """What the workers inherit from the parent's memory."""

    config: Config
    heartbeats: Heartbeats
    parent: int  # process id
    handled: tuple[signal.Signals, ...]  # those of HANDLED that are not ignored
    store: int  # descriptor of the file in which the ranks meet, if all are on this machine

    def stacks_of(self, rank: int) -> Path:
        return stacks_path(Path(self.config.run.dir), rank)


def worker_main(work: WorkerSpec, environ: Mapping[str, str], micro_batch: int | None) -> NoReturn:
    """Run this process's part of the job and exit with its code; never returns to the agent.

    So other threads of the process cannot delay the exit of a finished worker. `environ` has its rank.
    `micro_batch` is that with which a run out of memory is started again.
    """
    die_with_parent(work.parent)
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent alone, which passes it on
    os.environ.update(environ)
    _hold_signals(work.handled)
    # A crash in C writes its stack to stderr, which the outcome names.
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # without a stderr
        faulthandler.enable(all_threads=True)
    launch = replace(LaunchEnv.from_environ(os.environ), micro_batch=micro_batch)
    _write_stacks_on_request(work.stacks_of(launch.rank))
    # Held here until os._exit: its destructor would read the file, whose last record may be torn, for ever.
    file = dist.FileStore(f"/proc/self/fd/{work.store}")
    file.set_timeout(timedelta(seconds=work.config.launch.init_timeout_s))
    store: dist.Store | None = file if launch.world_size > 1 else None
    heartbeat = work.heartbeats.of(launch.rank)
    try:
        if launch.local_world_size < launch.world_size:  # several machines, whose parents share a store
            store = open_store(launch, work.config.launch.init_timeout_s)
            set_tcp_timeouts(work.config.launch.hang_timeout_s)
        worker.run(work.config, launch, store, str(launch.restart_count), heartbeat)
    except BaseException as error:
        record = exit_record(launch.rank, error, heartbeat.failed_s)
    else:
        record = exit_record(launch.rank)
    work.heartbeats.exit_records.write(record)
    kill_children()
    flush()
    os._exit(record.exit_code)


def _hold_signals(handled: Sequence[signal.Signals]) -> None:
    """Keep signals, which are still blocked, until the worker installs its own handlers and unblocks them.

    They get a handler that does nothing, because ignoring them would drop pending ones.
    """
    for number in HANDLED:
        signal.signal(number, _ignore if number in handled else signal.SIG_IGN)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing: before the worker's own handlers are installed, and after the job."""


def _write_stacks_on_request(path: Path) -> None:
    """Append all threads' stacks to `path` on DUMP_STACKS_SIGNAL, even while C code holds the interpreter."""
    with contextlib.suppress(OSError):  # the worker will report it
        path.parent.mkdir(exist_ok=True)
        file = path.open("ab")
        # It keeps the file open until the process ends.
        faulthandler.register(DUMP_STACKS_SIGNAL, file=file, all_threads=True)
