"""The parents of a run on several machines: how they agree that an attempt has ended, and why.

The protocol, by the keys of node 0's TCPStore:

- `attempt/N/NODE`: the number of workers that a node starts. All wait for all, which gives the ranks.
- `NODE`: a node's status, written anew every 0.2 s by a thread, so that a store that does not answer never
  delays a parent. Its `group_result` says how its workers have ended.
- Node 0 reads all statuses. Once the workers of some node have failed, its own status has `end_workers`, and
  the others end theirs. Once all have ended, it has the `outcome`: done, restart or an error.
- A node that ends with an error has it as its `outcome`. Those that wait for it to begin an attempt end too.
- A node without a new status is gone. Then each parent ends, and the same command resumes the run.

Imports torch only where it is used.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from launcher.config.codec import decoded, encoded
from launcher.config.schema import LaunchConfig
from launcher.distributed.env import RANK0, LaunchEnv, format_ranks
from launcher.distributed.exit_records import JobFailed
from launcher.distributed.store import ANSWER_S, set_tcp_timeouts
from launcher.errors import LauncherError, StalledError
from launcher.launch.root_cause import DONE, GroupResult, RunOutcome, outcome_of
from launcher.os.signals import StopSignal

if TYPE_CHECKING:
    import torch.distributed as dist

    from launcher.launch.worker_group import WorkerGroup

EXCHANGE_EVERY_S = 0.2  # of every parent; node 0 reads the statuses of all with one request
SILENCE_LIMIT_S = 5.0  # without a new status of a parent, once an attempt has ended on some machine
PAUSE_S = 1.0  # after a longer pause this process itself was stopped, and not the others
RESTART = -1  # exit code of what node 0 decides, if the run does not end


class SingleNode:
    """The only parent of a run: nothing to wait for and no socket."""

    rank = RANK0  # among the parents
    is_node0 = True  # whether this is the parent of rank 0, which decides
    host = ""  # its name in messages, where there are several

    def __enter__(self) -> SingleNode:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...

    def raise_if_stopped(self, signals: StopSignal) -> None:
        """Raise JobFailed if this parent was asked to stop before it has started workers."""
        if (stop := signals.stop) is not None:
            raise JobFailed(f"stopped by {stop.name} before the workers started", 128 + stop)

    def next_rendezvous(self, num_workers: int, signals: StopSignal) -> tuple[int, int]:
        """Begin the next attempt: the lowest rank of this machine's workers, and the number of all ranks."""
        return 0, num_workers

    def outcome(self, own: GroupResult | None, group: WorkerGroup) -> RunOutcome | None:
        """The outcome on all ranks, once all have ended."""
        return None if own is None else outcome_of([own], group.stacks)

    def publish_outcome(self, outcome: RunOutcome) -> None:
        """Tell other parents how the run ends, or RESTART."""


class MultiNode(SingleNode):
    """This parent among those of all machines. Statuses are exchanged while it is used as a context."""

    def __init__(self, launch: LaunchEnv, store: dist.Store, job: str, limits: LaunchConfig) -> None:
        self._limits = limits
        self.rank, self._num_nodes = launch.rank, launch.world_size
        self.is_node0, self.host = launch.rank == RANK0, os.uname().nodename
        self._store, self._prefix = store, f"job/{job}/nodes"
        # Whose statuses this parent reads.
        self._others = range(1, self._num_nodes) if self.is_node0 else [RANK0]
        self._status: dict[str, Any] = {"attempt": -1}
        self._statuses: Mapping[int, Mapping[str, Any]] = {}
        self._polled_s = time.monotonic()
        self._last_seen_s = dict.fromkeys(self._others, self._polled_s)
        self._lost_store = False
        self._over = threading.Event()

    def __enter__(self) -> MultiNode:
        # A connection of its own: a wait of the main thread holds the lock of the other one. Made before any
        # fork: it looks up a name, for which libc takes a lock that a worker forked meanwhile would never see
        # released. Workers are forked while the thread runs: it holds no lock that a worker takes.
        connection = self._store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(
            target=self._exchange, args=(connection,), name="statuses of the nodes", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, LauncherError):
            self.publish_outcome(RunOutcome(error.exit_code, str(error)))
        self._over.set()
        self._thread.join(ANSWER_S)

    def next_rendezvous(self, num_workers: int, signals: StopSignal) -> tuple[int, int]:
        """As above, once the parents of all machines have begun the next attempt."""
        from torch.distributed import DistError

        attempt = self._status["attempt"] + 1
        self._status = {"attempt": attempt}
        workers = [f"{self._prefix}/attempt/{attempt}/{node}" for node in range(self._num_nodes)]
        deadline = time.monotonic() + self._limits.init_timeout_s
        try:
            self._store.set(workers[self.rank], str(num_workers))
            # Waited for in Python: a wait of the store would not see a signal.
            while late := [node for node, key in enumerate(workers) if not self._store.check([key])]:
                self.raise_if_stopped(signals)
                self._raise_published()
                if attempt > 0:  # before that a node is silent while it imports torch
                    self._raise_if_silent(self._others, self._limits.hang_timeout_s)
                if time.monotonic() > deadline:
                    raise self._node_lost(late)
                time.sleep(0.05)
            counts = [int(self._store.get(key)) for key in workers]
        except DistError as error:
            raise self._node_lost([RANK0]) from error
        return sum(counts[: self.rank]), sum(counts)

    def outcome(self, own: GroupResult | None, group: WorkerGroup) -> RunOutcome | None:
        """Return the outcome on all ranks, which node 0 decides once those of all machines have ended.

        Ends the workers of this machine when those of another one have ended. On another node it is RESTART
        or the good end that node 0 has decided on; raises the error that it has decided on, and StalledError
        for a machine that is gone.
        """
        now = time.monotonic()
        if now - self._polled_s > PAUSE_S:
            self._last_seen_s = dict.fromkeys(self._others, now)
        self._polled_s = now
        if own is not None:
            self._status |= {"group_result": encoded(own)}
        return self._poll_as_node0(own, group) if self.is_node0 else self._poll_as_follower(own, group)

    def publish_outcome(self, outcome: RunOutcome) -> None:
        self._status |= {"outcome": asdict(outcome)}

    def _poll_as_node0(self, own: GroupResult | None, group: WorkerGroup) -> RunOutcome | None:
        self._raise_published()
        results = {} if own is None else {RANK0: own}
        for node in self._others:
            if "group_result" in (status := self._status_of(node)):
                results[node] = decoded(GroupResult, status["group_result"])
        if len(results) == self._num_nodes:
            return outcome_of([*results.values()], group.stacks)
        silence_limit_s = self._limits.hang_timeout_s
        if ends := [result.end for result in results.values() if result.end != DONE]:
            self._status.setdefault("end_workers", ends[0])
            if own is None:
                group.end_like_other_node(ends[0])
            silence_limit_s = min(silence_limit_s, SILENCE_LIMIT_S)
        self._raise_if_silent([node for node in self._others if node not in results], silence_limit_s)
        return None

    def _poll_as_follower(self, own: GroupResult | None, group: WorkerGroup) -> RunOutcome | None:
        self._raise_published()
        status = self._status_of(RANK0)
        if self._statuses.get(RANK0, self._status)["attempt"] > self._status["attempt"]:
            return RunOutcome(RESTART)  # it has begun before its outcome was read
        if published := status.get("outcome"):
            return RunOutcome(**published)
        if own is None and "end_workers" in status:
            group.end_like_other_node(status["end_workers"])
        self._raise_if_silent([RANK0], self._limits.hang_timeout_s if own is None else SILENCE_LIMIT_S)
        return None

    def _raise_published(self) -> None:
        """Raise the error that another node has published as its end, with its name unless it is node 0."""
        for node, status in self._statuses.items():
            outcome = RunOutcome(**status.get("outcome", {"exit_code": RESTART}))
            if outcome.exit_code not in (0, RESTART):
                named = f"node {node} ({status['host']}): {outcome.text}"
                raise (outcome if node == RANK0 else replace(outcome, text=named)).error()

    def _raise_if_silent(self, nodes: Sequence[int], silence_limit_s: float) -> None:
        now = time.monotonic()
        # One without a status imports torch.
        limits = {
            node: silence_limit_s if node in self._statuses else self._limits.init_timeout_s for node in nodes
        }
        silent = [node for node, limit_s in limits.items() if now - self._last_seen_s[node] > limit_s]
        if silent or (self._lost_store and not self.is_node0):
            raise self._node_lost(silent or [RANK0])

    def _node_lost(self, nodes: Sequence[int]) -> StalledError:
        set_tcp_timeouts(ANSWER_S)  # of what this process still asks the store
        hosts = [self._statuses[node]["host"] for node in nodes if node in self._statuses]
        named = f" ({', '.join(hosts)})" if hosts else ""
        return StalledError(
            f"{format_ranks(nodes, 'node')}{named} is gone: its parent process was killed or hangs, or the "
            "machine or the link to it is down. To resume, run the same command on all machines."
        )

    def _status_of(self, node: int) -> Mapping[str, Any]:
        """The status of the node, if of the present attempt."""
        status = self._statuses.get(node, {})
        return status if status.get("attempt") == self._status["attempt"] else {}

    def _exchange(self, store: dist.Store) -> None:
        """Publish and read statuses, until the end; the last one is published after it."""
        from torch.distributed import DistError

        keys = {node: f"{self._prefix}/{node}" for node in self._others}
        before: dict[int, bytes] = {}
        try:
            set_tcp_timeouts(self._limits.hang_timeout_s)
            for beat in itertools.count():
                over = self._over.wait(EXCHANGE_EVERY_S)
                status = {**self._status, "beat": beat, "host": self.host}  # a new text each time
                store.set(f"{self._prefix}/{self.rank}", json.dumps(status))
                if over:
                    break
                if len(before) < len(keys):  # some have not begun yet
                    keys_present = {node: key for node, key in keys.items() if store.check([key])}
                if keys_present:
                    texts = dict(zip(keys_present, store.multi_get([*keys_present.values()]), strict=True))
                    self._statuses = {node: json.loads(text) for node, text in texts.items()}
                    for node, text in texts.items():
                        if text != before.get(node):
                            self._last_seen_s[node] = time.monotonic()
                    before = texts
        except DistError:
            self._lost_store = True
