"""The elastic agent of a run: torch's, for one machine, without a port, with reasons for failures.

Owns what differs from torchrun's agent: workers are forked from this warm process and rendezvous through a
file without a name, a failed generation is killed at once, and every end has a reason with a name and an exit
code. Starting and reaping processes, the order of generations and the return of results are torch's.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from launcher.checkpoint.catalog import FOLDER, candidates, step_of
from launcher.config.messages import directory_override
from launcher.errors import ON_REQUEST, TO_RESUME, LauncherError, PreemptedError, PrunedError
from launcher.process.lifetime import Orphans
from launcher.run_dir.status import FILE_NAME, state_since
from launcher.supervisor.attempt import Generation
from launcher.supervisor.child import Work, be_a_rank
from launcher.supervisor.nodes import RESTART, OneMachine
from launcher.supervisor.parent_signals import Signals, held_back
from launcher.supervisor.restart_policy import Restarts
from launcher.supervisor.root_cause import PREEMPTED, AttemptVerdict, RunFailed

EXIT_S = 10  # for the agents of other machines to end, once node 0 has decided
POLL_EVERY_S = 0.05  # a failure is noticed well before SETTLE_S; each poll reads some rows of memory


class Inherited(LogsSpecs):
    """Workers write to the parent's own stdout and stderr. Nothing is redirected: no thread tails files."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environ in envs.values():
            environ["TORCHELASTIC_ERROR_FILE"] = ""
        streams = dict.fromkeys(envs, "")
        return LogsDest(streams, streams.copy(), error_files=streams.copy())

    @property
    def root_log_dir(self) -> str:
        return ""


class Agent(LocalElasticAgent):
    """Runs the workers of one run to its end. `run` raises the LauncherError of a run that fails."""

    def __init__(self, work: Work, num_workers: int, signals: Signals, nodes: OneMachine) -> None:
        max_restarts = work.config.launch.max_restarts
        run_dir = Path(work.config.run.dir)
        super().__init__(
            WorkerSpec(
                role="worker",
                local_world_size=num_workers,
                rdzv_handler=nodes,
                entrypoint=be_a_rank,
                args=(work,),
                max_restarts=max_restarts,
                monitor_interval=POLL_EVERY_S,
            ),
            Inherited(),
            start_method="fork",
            exit_barrier_timeout=EXIT_S,
        )
        self._nodes = nodes
        self._work = work
        self._signals = signals
        self._run_dir, self._began = run_dir, time.time()
        self._checkpoints = run_dir / FOLDER
        self._restarts = Restarts(max_restarts, self._newest_step())
        self._generation: Generation | None = None
        self._stopping = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self._work.restart(worker_group.workers[0].global_rank)
        orphans = Orphans()
        with held_back():
            pids: dict[int, object] = super()._start_workers(worker_group)
            self._signals.handle()  # the agent has replaced them by its own handlers
        assert self._pcontext is not None
        processes = self._pcontext._pc.processes  # type: ignore[attr-defined]
        self._generation = Generation(processes, self._work, orphans, self._nodes.host)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._generation is not None
        self._obey_signals(self._generation)
        try:
            verdict = self._nodes.verdict(self._generation.poll(), self._generation)
            if verdict is None:
                return RunResult(WorkerState.HEALTHY)
            if verdict.exit_code not in (0, RESTART):
                self._restart_or_raise(verdict)
                verdict = AttemptVerdict(RESTART)
        except LauncherError as error:
            self._nodes.decide(AttemptVerdict(error.exit_code, str(error)))
            raise
        self._nodes.decide(verdict)
        if verdict.exit_code == RESTART:
            return RunResult(WorkerState.FAILED)  # the agent starts the next generation
        ranks = [worker.global_rank for worker in worker_group.workers]
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _obey_signals(self, generation: Generation) -> None:
        for arrived in self._signals.take():
            generation.send(arrived)
        if self._signals.stop is not None and not self._stopping:
            self._stopping = True
            generation.end_within(self._work.config.launch.grace_s)
        if self._signals.impatient:
            generation.end_within(0)

    def _restart_or_raise(self, verdict: AttemptVerdict) -> None:
        if not self._nodes.leads:
            raise RunFailed(verdict)  # as node 0 has decided
        if self._signals.stop is None and (asked := self._nodes.stop_elsewhere):
            self._signals.stop = signal.Signals(asked)
        newest = self._newest_step()
        state = state_since(self._run_dir / FILE_NAME, self._began)
        if self._signals.stop is not None and state == "preempted":
            # Rank 0 has saved the run, and was killed before it had left.
            again = directory_override("run.dir", self._run_dir)
            text = f"after step {newest}, on request; checkpoint saved. {TO_RESUME} {again}"
            raise RunFailed(AttemptVerdict(PREEMPTED, text))
        if verdict.exit_code in ON_REQUEST or self._signals.stop is not None:
            raise stopped(verdict, self._signals.stop, newest)
        self._restarts.allow(verdict, newest)
        count = f"{self._restarts.used} of {self._restarts.allowed}"
        place = f"step {newest} (checkpoint)" if newest else "the start (no checkpoint)"
        text = f"{verdict.traceback}restart {count}: {verdict.text}; resuming from {place}"
        print(text, file=sys.stderr, flush=True)

    def _newest_step(self) -> int:
        """Step of the newest checkpoint, by name; 0 if there is none. The workers check if it is intact."""
        return max(map(step_of, candidates(self._checkpoints)), default=0)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Kill the workers: at the end of a run there is nothing left to stop gracefully."""
        if self._generation is not None:
            self._generation.kill()
            self._generation.tidy()
        super()._shutdown(signal.SIGKILL)  # without a timeout, which torch 2.11 does not take

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        """An event that is not read, without the host name, whose lookup may take seconds."""
        return Event(f"torchelastic.worker.status.{state}", source=source)


def stopped(verdict: AttemptVerdict, asked: signal.Signals | None, newest_step: int) -> LauncherError:
    """The error for a run that was asked to end. `newest_step` is that of its checkpoints."""
    if verdict.exit_code == PREEMPTED:
        return PreemptedError(verdict.text)
    if verdict.exit_code == PrunedError.exit_code:
        return PrunedError(verdict.text)
    assert asked is not None
    if verdict.last_step is not None and newest_step >= verdict.last_step:
        text = (
            f"stopped by {asked.name} after the last step, while results were being written or uploaded. The "
            f"checkpoint of step {verdict.last_step} is saved. The same command with this run.dir completes "
            "the run."
        )
        return RunFailed(AttemptVerdict(PREEMPTED, text))
    text = f"stopped by {asked.name} before a checkpoint could be written: {verdict.text}"
    return RunFailed(AttemptVerdict(128 + asked, text, verdict.hint))
