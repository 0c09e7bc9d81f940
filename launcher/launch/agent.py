"""The agent of a run: starts its workers on this machine, attempt after attempt, until one ends well.

Sets the environment of each worker as torchrun does (RANK, WORLD_SIZE, ...). On one machine the ranks use a
FileStore on a memfd, so no port is opened. A failed attempt is killed, and every end has a reason with a name
and an exit code.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path

from launcher.checkpoint.catalog import candidates, step_of
from launcher.config.messages import directory_override
from launcher.distributed.exit_records import JobFailed
from launcher.distributed.heartbeat import stop_notice
from launcher.errors import ON_REQUEST, TO_RESUME, LauncherError, PreemptedError, PrunedError, counted
from launcher.launch.multi_node import RESTART, SingleNode
from launcher.launch.restart_policy import RestartPolicy
from launcher.launch.root_cause import SAVED, RunOutcome
from launcher.launch.worker_count import count_gpus
from launcher.launch.worker_group import WorkerGroup
from launcher.launch.worker_process import WorkerSpec, worker_main
from launcher.os.signals import StopSignal, signals_blocked
from launcher.os.stdio import write
from launcher.run_dir.discarding import discards_steps, has_discarded, overrides_to_resume
from launcher.run_dir.records import CHECKPOINTS

POLL_EVERY_S = 0.05  # a failure is noticed well before ERROR_GRACE_S; each poll reads some rows of memory


class Agent:
    """Runs the workers of one run to its end. `run` raises the LauncherError of a run that fails."""

    def __init__(self, work: WorkerSpec, num_workers: int, signals: StopSignal, nodes: SingleNode) -> None:
        self._work, self._num_workers = work, num_workers
        self._signals, self._nodes = signals, nodes
        self._micro_batch: int | None = None  # the micro-batch of a run that has run out of memory
        self._answered = False  # whether a request to stop has been answered
        self._run_dir = Path(work.config.run.dir)
        self._restarts = RestartPolicy(work.config.launch.max_restarts, self._newest_step())

    def run(self) -> None:
        """Start all workers and wait until their end has been decided on, again for each restart."""
        for number in itertools.count():
            first_rank, world_size = self._nodes.next_rendezvous(self._num_workers, self._signals)
            # One that was killed within a write has left a torn record. All have ended.
            os.ftruncate(self._work.store, 0)
            self._work.heartbeats.restart(first_rank)
            processes = self._workers(number, first_rank, world_size)
            group = WorkerGroup(processes, self._work, self._nodes.host)
            try:
                with signals_blocked():
                    for process in processes:
                        process.start()
                while (outcome := self._polled(group)) is None:
                    time.sleep(POLL_EVERY_S)
            finally:
                group.kill()
            if outcome.exit_code != RESTART:
                return
            self._micro_batch = outcome.micro_batch or self._micro_batch

    def _workers(self, number: int, first_rank: int, world_size: int) -> list[ForkProcess]:
        """The processes of an attempt, each with the variables by which torchrun tells a rank its place."""
        several = world_size > self._num_workers  # machines, whose parents share a store
        shared = {
            "GROUP_RANK": str(self._nodes.rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(self._num_workers),
            # On one machine the ranks meet in a file, and nothing listens.
            "MASTER_ADDR": os.environ["MASTER_ADDR"] if several else "127.0.0.1",
            "MASTER_PORT": os.environ["MASTER_PORT"] if several else "0",
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "TORCHELASTIC_MAX_RESTARTS": str(self._restarts.allowed),
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_USE_AGENT_STORE": str(several),
        }
        own = ({"RANK": str(first_rank + each), "LOCAL_RANK": str(each)} for each in range(self._num_workers))
        every = [(self._work, shared | places, self._micro_batch) for places in own]
        return [ForkProcess(target=worker_main, args=args) for args in every]

    def _polled(self, group: WorkerGroup) -> RunOutcome | None:
        """How the run ends, or RESTART, once all workers have ended."""
        self._forward_signals(group)
        own = group.poll()
        if own is not None:
            own = replace(own, stop=self._signals.stop or 0)
        outcome = self._nodes.outcome(own, group)
        if outcome is not None and outcome.exit_code not in (0, RESTART):
            self._restart_or_raise(outcome)
            outcome = RunOutcome(RESTART, micro_batch=outcome.micro_batch)
        if outcome is not None:
            self._nodes.publish_outcome(outcome)
        return outcome

    def _forward_signals(self, group: WorkerGroup) -> None:
        for received in self._signals.pop_received():
            group.send(received)
        if self._signals.stop is not None:
            group.set_deadline(self._work.config.launch.grace_s)
            self._answer_stop(group)
        if self._signals.force_quit:
            group.set_deadline(0)

    def _answer_stop(self, group: WorkerGroup) -> None:
        """Print at once what a request to stop leads to: a step may take long."""
        if not self._answered and self._nodes.is_node0:
            self._answered = True
            ahead = int(count_gpus() > 0)  # GPUs have the next step in their queues already
            write(f"{stop_notice(group.furthest, ahead)}\n", sys.stderr)

    def _restart_or_raise(self, outcome: RunOutcome) -> None:
        """Decide, on node 0, on an attempt that has failed or was asked to end."""
        newest = self._newest_step()
        if outcome.exit_code in ON_REQUEST or outcome.stop:
            raise self._stop_error(outcome, newest)
        hint = f"{self._how_to_resume(newest)} {self._restarts_made()}"
        self._restarts.record_or_raise(outcome, newest, hint)
        count = f"{self._restarts.used} of {self._restarts.allowed}"
        place = f"step {newest} (checkpoint)" if newest else "the start (no checkpoint)"
        place += f" with data.micro_batch_size={outcome.micro_batch}" if outcome.micro_batch else ""
        text = f"{outcome.traceback}restart {count}: {outcome.text.removesuffix('.')}; resuming from {place}"
        write(f"{text}\n", sys.stderr)

    def _stop_error(self, outcome: RunOutcome, newest: int) -> LauncherError:
        """The error for a run that was asked to end. `newest` is the step of its newest checkpoint."""
        if outcome.exit_code in ON_REQUEST:
            return (PreemptedError if outcome.exit_code == SAVED else PrunedError)(outcome.text)
        stop = signal.Signals(outcome.stop)
        is_saved = 0 < newest >= self._work.heartbeats.steps_done()
        if is_saved and not outcome.crashed:
            # It was killed after that, such as while results were uploaded.
            again = overrides_to_resume(self._run_dir)
            text = f"after step {newest}, on request; checkpoint saved. {TO_RESUME} {again}"
            return JobFailed(text, SAVED)
        when = "after the last checkpoint" if is_saved else "before a checkpoint could be written"
        text = f"stopped by {stop.name} {when}: {outcome.text}"
        hint = f"{outcome.hint} {self._how_to_resume(newest)}".lstrip()
        return replace(outcome, exit_code=128 + stop, text=text, hint=hint).error()

    def _how_to_resume(self, newest: int) -> str:
        if newest:
            again = overrides_to_resume(self._run_dir)
            return f"To resume from step {newest}: the same command with {again}."
        again = directory_override("run.dir", self._run_dir)
        return f"There is no checkpoint: the same command with {again} begins anew."

    def _restarts_made(self) -> str:
        used, allowed = self._restarts.used, self._restarts.allowed
        restarts = f"Restarted {counted(used, 'time')}" if used else "Not restarted"
        return f"{restarts} (launch.max_restarts={allowed})."

    def _newest_step(self) -> int:
        """Step of the newest checkpoint, by name; 0 if there is none. The workers check if it is intact."""
        present, resume = candidates(self._run_dir / CHECKPOINTS), self._work.config.checkpoint.resume
        if discards_steps(resume, self._run_dir) and not has_discarded(self._run_dir):
            # The first attempt sets the others aside: they are no progress of this run.
            chosen = Path(resume).resolve()
            present = [path for path in present if path.resolve().is_relative_to(chosen)]
        return max(map(step_of, present), default=0)
