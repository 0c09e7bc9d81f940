"""How the ranks of one launch agree on what to run.

Owns the hand-over of each job from rank 0, which alone reads argv and runs Hydra, to the other ranks; the
confirmation that all have left a job before the next begins; and how the other ranks learn that rank 0 has
ended. Never composes a config, and imports torch only when it opens the store.

Two launches that share an address and a port would train with each other's ranks. So each rank compares its
arguments and its job's id with those of rank 0, and claims its number.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    wait_for_key,
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

# Set by schedulers, the same for all ranks of a job.
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")

# Exit codes of ends that all ranks have decided together, so that each will say so.
TOGETHER = STOPPED | ON_REQUEST | {DivergedError.exit_code, ReplicaError.exit_code}

RunRank = Callable[[Config, LaunchEnv, "dist.Store | None", str], None]


@dataclass(frozen=True)
class LaunchTimeouts:
    """How long rank 0 and the other ranks wait for each other."""

    first_job_s: float = 300.0  # followers, for the config: thousands of ranks import from one file system
    next_job_s: float = 1800.0  # followers, after a job: rank 0 may still draw plots and upload
    leave_s: float = 60.0  # all ranks, once one has left a job: the others may be writing a checkpoint
    lost_s: float = 3.0  # after an error of one rank: for the others to record why they end
    goodbye_s: float = 30.0  # rank 0, until all have confirmed the end: some may still be importing torch

    def after(self, record: ExitRecord) -> float:
        """How long to wait for the other side after a job that ended so."""
        # After an error of this rank alone, the others may wait for it in a collective, where they read
        # nothing; a rank or a machine that hangs or is gone says nothing at all.
        return self.lost_s if record.error and record.exit_code not in TOGETHER else self.leave_s


DEFAULT_TIMEOUTS = LaunchTimeouts()


class ConfigLeader:
    """Rank 0, or the only process: hands out jobs, runs its own part, and announces the end.

    The store is opened with the first message, so that a config is composed before torch is imported.
    """

    def __init__(
        self,
        launch: LaunchEnv,
        run_rank: RunRank,
        timeouts: LaunchTimeouts = DEFAULT_TIMEOUTS,
        arguments: Sequence[str] = (),
    ) -> None:
        self.launch, self._run_rank, self._arguments = launch, run_rank, arguments
        self._timeouts = timeouts
        self._others = range(1, launch.world_size)
        # Ranks that have not come, or not left: they will not confirm the end either.
        self._missing_ranks: list[int] = []
        self.group_broken = False  # some ranks failed and others did not: no further job can run here
        self._store: dist.Store | None = None
        self._jobs = 0  # that have been handed out, each by a message

    def run(self, config: Config) -> None:
        """Run one job on all ranks; raises what failed first, on whichever rank.

        Raises StalledError if a rank is still in the job long after another left it: no job can follow.
        """
        job = str(self._jobs)
        store = self._send({"job": job, "config": to_dict(config)})
        self._jobs += 1
        self._gather(store, config.launch.init_timeout_s)
        set_tcp_timeouts(config.launch.hang_timeout_s)
        failure: Exception | None = None
        try:
            self._run_rank(config, self.launch, store, job)
        except Exception as error:
            failure = error
            ignore_sigterm_of_torchrun()  # it is sent as soon as another rank has ended
        own = exit_record(self.launch.rank, failure)
        self.group_broken = True  # unless all ranks record how they have ended
        records = self._records(store, job, own)
        self.group_broken = bool(self._missing_ranks) or len({bool(each.error) for each in records}) > 1
        failed = [each for each in records if each.error]
        # The clocks of machines differ: of several errors, that of rank 0 counts where it has one.
        cause = min(failed, key=lambda each: (each.is_secondary, each is not own, each.time_s), default=own)
        text = with_rank(cause, records)
        needs_no_rank = len(records) == 1 or cause.exit_code in ON_REQUEST
        if failure is not None and (text == own.error or (cause is own and needs_no_rank)):
            raise failure
        if cause.error:
            raise JobFailed(text, cause.exit_code, cause.traceback, self._has_printed(cause)) from failure

    def _has_printed(self, cause: ExitRecord) -> bool:
        """Whether a rank of this machine that failed alone has left meanwhile, with its error on stderr."""
        with ignore_store_errors():
            own_machine = 0 < cause.rank < self.launch.local_world_size
            return own_machine and self._store is not None and self._store.check([f"heard/{cause.rank}"])
        return False

    def recalled(self, config: Config) -> Config:
        """The config with the directory that an earlier attempt of this launch gave to the job.

        Otherwise a restart without `run.dir` would start over in a new directory.
        """
        if config.run.dir or not self.launch.restart_count:
            return config
        store, key = restart_store(self._opened(), self.launch), f"directory/{self._jobs}"
        if store is None or not store.check([key]):
            return config
        return replace(config, run=replace(config.run, dir=json.loads(store.get(key))))

    def remember(self, config: Config) -> None:
        """Record the directory of the job for restarts."""
        store = restart_store(self._opened(), self.launch)
        if store is not None:
            store.set(f"directory/{self._jobs}", json.dumps(config.run.dir))

    def send_exit(self, exit_code: int, reason: str = "") -> None:
        """Send the other ranks the exit code to leave with, and wait for their confirmation."""
        # If the store is gone, or could not be opened before either, no rank can be reached.
        with ignore_store_errors(), contextlib.suppress(LauncherError):
            store = self._send({"end": True, "exit_code": exit_code, "reason": reason})
            if store is not None:  # a rank that does not confirm has died
                left = [rank for rank in self._others if rank not in self._missing_ranks]
                missing_ranks(store, "heard/{}", left, self._timeouts.goodbye_s)

    def _send(self, message: dict[str, object]) -> dist.Store | None:
        store = self._opened()
        if store is not None:
            store.set(f"message/{self._jobs}", json.dumps(message))
        return store

    def _opened(self) -> dist.Store | None:
        if self._store is None and (store := open_store(self.launch, self._timeouts.first_job_s)):
            # Before any job: the others compare their launch with it as they join.
            claim(store, self.launch, "leader", origin(self._arguments))
            self._store = store
        return self._store

    def _gather(self, store: dist.Store | None, wait_s: float) -> None:
        """Wait until all ranks are here; raises JobFailed naming those that do not come."""
        if store is None:
            return
        self._missing_ranks = missing_ranks(store, "here/{}", self._others, wait_s)
        if self._missing_ranks:
            silent = format_ranks(self._missing_ranks, self.launch.role)
            text = (
                f"{silent} did not come to {self.launch.endpoint} within {wait_s:g} s: it "
                "was not started, has died, or was started with other values of these. "
                f"launch.init_timeout_s says how long {self.launch.role} 0 waits."
            )
            raise JobFailed(text, StalledError.exit_code)

    def _records(self, store: dist.Store | None, job: str, own: ExitRecord) -> list[ExitRecord]:
        """How each rank ended the job, this one first, as far as they have recorded it.

        Raises StalledError if one does not leave, JobFailed if it is the one that this rank has lost.
        """
        if store is None:
            return [own]
        wait_s = self._timeouts.after(own)
        records = StoreExitRecords(store, job)
        with ignore_store_errors():
            self._missing_ranks = records.missing(self._others, wait_s)
            found = records.read(self._others)
            silent = format_ranks(self._missing_ranks, self.launch.role)
            if self._missing_ranks and own.is_secondary and all(each.is_secondary for each in found):
                text = (
                    f"{silent} was lost, and has not said why within {wait_s:g} s: it was killed, hangs, or "
                    f"its machine or the link to it is gone. The connection: {own.error}"
                )
                raise JobFailed(text, own.exit_code, own.traceback)
            if self._missing_ranks and not own.error:
                raise StalledError(
                    f"{silent} did not leave job {job} within {wait_s:g} s after {self.launch.role} 0 did."
                )
            return [own, *found]
        return [own]


def follow(
    launch: LaunchEnv,
    run_rank: RunRank,
    timeouts: LaunchTimeouts = DEFAULT_TIMEOUTS,
    on_end: Callable[[], None] = lambda: None,
    arguments: Sequence[str] = (),
) -> tuple[int, str]:
    """Run the jobs that rank 0 hands out, until it ends; returns its exit code and reason.

    `on_end` is called before the end is confirmed to rank 0: torchrun ends the remaining ranks once one has
    failed. Raises this rank's own failure if rank 0 does not react to it, StalledError if rank 0 is silent,
    PreflightError if it belongs to another launch.
    """
    store = open_store(launch, timeouts.first_job_s)
    assert store is not None, "a single process has no leader"
    join_launch(store, launch, arguments, timeouts.first_job_s)
    failure: Exception | None = None
    wait_s = timeouts.first_job_s
    for number in itertools.count():
        what = "the next job" if number else "the job"
        try:
            message = json.loads(wait_for_key(store, f"message/{number}", wait_s, launch, what, failure))
        except Exception:
            on_end()  # torchrun may end this rank before its error is printed
            with ignore_store_errors():  # this rank leaves: rank 0 need not wait for it at the end
                store.set(f"heard/{launch.rank}", "")
            raise
        if "end" in message:
            on_end()
            store.set(f"heard/{launch.rank}", "")
            break
        job, config, failure = message["job"], from_dict(message["config"]), None
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
        wait_s = timeouts.after(record) if failure else timeouts.next_job_s
    return message["exit_code"], message["reason"]


def origin(arguments: Sequence[str]) -> dict[str, Any]:
    """What tells the ranks of one launch from those of another, and this process from others."""
    ids = {key: os.environ.get(key) for key in JOB_IDS}
    return {"given": [*arguments], "ids": ids, "host": socket.gethostname(), "process": os.getpid()}


def join_launch(store: dist.Store, launch: LaunchEnv, arguments: Sequence[str], wait_s: float) -> None:
    """Tell rank 0 that this rank is here; raises PreflightError if one of the two is of another launch."""
    own, role = origin(arguments), launch.role
    leader = json.loads(wait_for_key(store, "leader", wait_s, launch, "the job", None))
    given, theirs = Counter(own["given"]), Counter(leader["given"])
    only = (given - theirs, f"this {role}"), (theirs - given, f"{role} 0")
    differences = [f"only {who} was given {' '.join(words)}" for words, who in only if words]
    ids = ((key, here, leader["ids"].get(key)) for key, here in own["ids"].items())
    differences += [
        f"{key} is {here} here and {there} on {role} 0" for key, here, there in ids if here != there
    ]
    if differences:
        raise PreflightError(
            f"{launch.name} and the {role} 0 that it found at {launch.endpoint} (process "
            f"{leader['process']} on {leader['host']}) are not of one launch: {'; '.join(differences)}. Give "
            f"all {role}s of a launch the same arguments, and each launch a port of its own."
        )
    claim(store, launch, f"here/{launch.rank}", own)


def claim(store: dist.Store, launch: LaunchEnv, key: str, own: Mapping[str, object]) -> None:
    """Record this process under a key; raises PreflightError if another process has."""
    first = json.loads(store.compare_set(key, "", json.dumps(own)))
    if first != own:
        number = "launch.node_rank" if launch.is_node else "RANK"
        raise PreflightError(
            f"another process is {launch.name} already at {launch.endpoint}: {first['process']} on "
            f"{first['host']}. Give each process of a launch a {number} of its own, and each launch a port "
            "of its own."
        )
