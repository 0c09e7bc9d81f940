"""How the ranks of one launch agree on what to run: rank 0 reads argv and runs Hydra, and sends jobs.

The protocol, by the keys of the store that the ranks of a launch share:

- `message/N`, of rank 0: the config of job N and the arguments of rank 0, or the end of the launch.
- `joined/R`, of rank R: it has the same arguments, and runs the job. Rank 0 names those that do not come.
- `job/N/exit/R`, of rank R: its exit record of job N. Rank 0 raises the first failure of all ranks.
- `left/R`, of rank R: it has read the end, or leaves with an error of its own. Rank 0, which may host the
  store, ends last.

Without torchrun two launches may share an address and a port, so ranks with other arguments are refused.
Imports torch only when it opens the store, so that a config is composed before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.config.schema import Config, from_dict, to_dict
from launcher.distributed.env import RANK0, LaunchEnv, format_ranks
from launcher.distributed.exit_records import ExitRecord, JobFailed, StoreExitRecords, exit_record, with_rank
from launcher.distributed.store import (
    ignore_store_errors,
    missing_ranks,
    open_store,
    restart_store,
    set_tcp_timeouts,
    wait_for_keys,
)
from launcher.errors import (
    ON_REQUEST,
    STOPPED,
    DivergedError,
    LauncherError,
    PreflightError,
    ReplicaError,
    StalledError,
)
from launcher.os.signals import ignore_sigterm_of_torchrun

if TYPE_CHECKING:
    import torch.distributed as dist

INIT_S = 300.0  # for all ranks to come: thousands import from one file system
NEXT_JOB_S = 1800.0  # for rank 0 after a job, which may still draw plots and upload
LEAVE_S = 60.0  # for all ranks, once one has left a job; some may still be importing torch
LOST_S = 3.0  # after an error of one rank: for the others to record why they end

# Exit codes of ends that all ranks have decided together, so that each will record it.
TOGETHER = STOPPED | ON_REQUEST | {DivergedError.exit_code, ReplicaError.exit_code}

RunRank = Callable[[Config, LaunchEnv, "dist.Store | None", str], None]


def seconds_after(record: ExitRecord) -> float:
    """How long to wait for the other ranks after a job that ended so on this one."""
    # After an error of this rank alone, the others may wait for it in a collective, where they read
    # nothing; a rank or a machine that hangs or is gone records nothing at all.
    return LOST_S if record.error and record.exit_code not in TOGETHER else LEAVE_S


class ConfigBroadcast:
    """Rank 0, or the only process: sends jobs, runs its own part, and announces the end."""

    def __init__(
        self,
        launch: LaunchEnv,
        run_rank: RunRank,
        init_timeout_s: float = INIT_S,
        arguments: Sequence[str] = (),
    ) -> None:
        self.launch, self._run_rank, self._arguments = launch, run_rank, [*arguments]
        self._init_timeout_s = init_timeout_s
        self._others = range(1, launch.world_size)
        self._missing_ranks: list[int] = []  # that have not come, or not left
        self.group_broken = False  # some ranks failed and others did not: no further job can run here
        self._store: dist.Store | None = None
        self._jobs = 0  # that have been sent, each by a message

    def run(self, config: Config) -> None:
        """Run one job on all ranks; raises what failed first, on whichever rank.

        Raises StalledError if a rank is still in the job long after another left it: no job can follow.
        """
        job = str(self._jobs)
        store = self._send({"arguments": self._arguments, "config": to_dict(config)})
        self._jobs += 1
        if store is None:
            self._run_rank(config, self.launch, None, job)
            return
        self._wait_until_joined(store, config.launch.init_timeout_s)
        set_tcp_timeouts(config.launch.hang_timeout_s)
        failure: Exception | None = None
        try:
            self._run_rank(config, self.launch, store, job)
        except Exception as error:
            failure = error
            ignore_sigterm_of_torchrun()  # it is sent as soon as another rank has ended
        self.group_broken = True  # unless all ranks record how they have ended
        self._raise_first_failure(StoreExitRecords(store, job), failure)

    def _raise_first_failure(self, records: StoreExitRecords, failure: Exception | None) -> None:
        """Wait for the records of all ranks, and raise what failed first; `failure` is this rank's own."""
        own = exit_record(self.launch.rank, failure)
        found, wait_s = [own], seconds_after(own)
        with ignore_store_errors():  # if it is gone, no more is known than how this rank has ended
            self._missing_ranks = records.missing(self._others, wait_s)
            found += records.read(self._others)
        failed = [each for each in found if each.error]
        self.group_broken = bool(self._missing_ranks) or 0 < len(failed) < len(found)
        silent = format_ranks(self._missing_ranks, self.launch.role)
        if self._missing_ranks and not failed:
            raise StalledError(
                f"{silent} did not leave the job within {wait_s:g} s after {self.launch.role} 0 did."
            )
        if self._missing_ranks and all(each.is_secondary for each in failed):
            text = (
                f"{silent} was lost, and has not said why within {wait_s:g} s: it was killed, hangs, or "
                f"its machine or the link to it is gone. The connection: {failed[0].error}"
            )
            raise JobFailed(text, failed[0].exit_code, failed[0].traceback)
        if not failed:
            return
        # The clocks of machines differ: of several errors, that of rank 0 counts where it has one.
        cause = min(failed, key=lambda each: (each.is_secondary, each is not own, each.time_s))
        text = with_rank(cause, found)
        if failure is not None and (len(found) == 1 or text == own.error):
            raise failure
        raise JobFailed(text, cause.exit_code, cause.traceback) from failure

    def with_saved_run_dir(self, config: Config) -> Config:
        """The config with the directory that the job had before torchrun restarted this launch.

        Otherwise a restart without `run.dir` would start over in a new directory.
        """
        if config.run.dir or not self.launch.restart_count:
            return config
        store, key = restart_store(self._opened(), self.launch), f"directory/{self._jobs}"
        if store is None or not store.check([key]):
            return config
        return replace(config, run=replace(config.run, dir=json.loads(store.get(key))))

    def save_run_dir(self, config: Config) -> None:
        """Record the directory of the job for restarts."""
        store = restart_store(self._opened(), self.launch)
        if store is not None:
            store.set(f"directory/{self._jobs}", json.dumps(config.run.dir))

    def send_exit(self, exit_code: int, reason: str = "") -> None:
        """Send the other ranks the exit code to leave with, and wait until they have read it."""
        # If the store is gone, or could not be opened before either, no rank can be reached.
        with ignore_store_errors(), contextlib.suppress(LauncherError):
            store = self._send({"exit_code": exit_code, "reason": reason})
            if store is not None:  # a rank that does not confirm has died
                left = [rank for rank in self._others if rank not in self._missing_ranks]
                missing_ranks(store, "left/{}", left, LEAVE_S)

    def _send(self, message: dict[str, object]) -> dist.Store | None:
        store = self._opened()
        if store is not None:
            store.set(f"message/{self._jobs}", json.dumps(message))
        return store

    def _opened(self) -> dist.Store | None:
        self._store = self._store or open_store(self.launch, self._init_timeout_s)
        return self._store

    def _wait_until_joined(self, store: dist.Store, wait_s: float) -> None:
        """Raise JobFailed naming the ranks that do not come."""
        self._missing_ranks = missing_ranks(store, "joined/{}", self._others, wait_s)
        if self._missing_ranks:
            silent = format_ranks(self._missing_ranks, self.launch.role)
            text = (
                f"{silent} did not come to {self.launch.endpoint} within {wait_s:g} s: it "
                "was not started, has died, or was started with other values of these. "
                f"launch.init_timeout_s says how long {self.launch.role} 0 waits."
            )
            raise JobFailed(text, StalledError.exit_code)


def receive_jobs(
    launch: LaunchEnv, run_rank: RunRank, init_timeout_s: float = INIT_S, arguments: Sequence[str] = ()
) -> tuple[int, str]:
    """Run the jobs that rank 0 sends, until it ends; returns its exit code and reason.

    Raises this rank's own failure if rank 0 does not react to it, StalledError if rank 0 is silent,
    PreflightError if it belongs to another launch.
    """
    store = open_store(launch, init_timeout_s)
    assert store is not None, "a single process has no rank 0 to follow"
    failure: Exception | None = None
    wait_s = init_timeout_s
    for job in map(str, itertools.count()):
        try:
            message = _received(store, f"message/{job}", wait_s, launch, failure)
        except Exception:
            ignore_sigterm_of_torchrun()  # it may end this rank before its error is printed
            with ignore_store_errors():  # this rank leaves: rank 0 need not wait for it at the end
                store.set(f"left/{launch.rank}", "")
            raise
        if "config" not in message:
            ignore_sigterm_of_torchrun()
            store.set(f"left/{launch.rank}", "")
            return message["exit_code"], message["reason"]
        refuse_other_launch(message["arguments"], arguments, launch)
        config, failure = from_dict(message["config"]), None
        store.set(f"joined/{launch.rank}", "")
        set_tcp_timeouts(config.launch.hang_timeout_s)
        try:
            run_rank(config, launch, store, job)
        except Exception as error:
            failure = error
        record = exit_record(launch.rank, failure)
        with ignore_store_errors():  # waiting for the next job raises then
            records = StoreExitRecords(store, job)
            records.write(record)
            # A rank 0 that hangs has said so before it ended, and gives no reason later.
            if record.is_secondary and (cause := records.read([RANK0])) and not cause[0].is_secondary:
                failure = JobFailed(with_rank(cause[0], cause), cause[0].exit_code)
        wait_s = seconds_after(record) if failure else NEXT_JOB_S
    raise AssertionError("rank 0 sends an end")


def _received(
    store: dist.Store, key: str, wait_s: float, launch: LaunchEnv, failure: Exception | None
) -> dict[str, Any]:
    """The message of rank 0. Raises `failure`, or else StalledError, if it does not come."""
    from torch.distributed import DistError

    first, began = f"{launch.role} 0", time.monotonic()
    try:
        if wait_for_keys(store, [key], wait_s):
            return dict(json.loads(store.get(key)))
        text = f"{first.capitalize()} is still starting, hangs, or has died: its output says which."
    except DistError:
        text = f"Then the store was gone: {first} or its torchrun has ended, or the link to it is down."
    waited_s = time.monotonic() - began
    raise failure or StalledError(f"{launch.name} waited {waited_s:.0f} s for {first} to send a job. {text}")


def refuse_other_launch(theirs: Sequence[str], own: Sequence[str], launch: LaunchEnv) -> None:
    """Raise PreflightError where rank 0 was started with other arguments than this rank."""
    if sorted(theirs) != sorted(own):
        role = launch.role
        raise PreflightError(
            f"{launch.name} was given {' '.join(own)}, and the {role} 0 that it found at {launch.endpoint} "
            f"{' '.join(theirs)}: they are not of one launch. Give all {role}s of a launch the same "
            "arguments, and each launch a port of its own."
        )
