"""The parents of a run on several machines: how they agree that a generation has ended, and why.

Each parent (torchelastic: agent) publishes one status every 0.2 s in node 0's TCPStore: its generation, and
once its workers have ended, how. Node 0 reads all statuses, tells the others to end theirs, and publishes the
outcome: done, restart or an error. A thread exchanges the statuses, so that a store that does not answer
never delays a parent. Imports torch only where it is used.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from launcher.config.schema import LaunchConfig
from launcher.distributed.env import RANK0, LaunchEnv, format_ranks
from launcher.distributed.store import LEAVE_S, set_tcp_timeouts
from launcher.errors import StalledError
from launcher.launch.root_cause import DONE, GroupResult, RunFailed, RunOutcome, outcome_of
from launcher.run_dir.codec import decoded, encoded

if TYPE_CHECKING:
    import torch.distributed as dist

    from launcher.launch.worker_group import WorkerGroup

EXCHANGE_EVERY_S = 0.2  # of every parent; node 0 reads the words of all with one request
QUIET_S = 5.0  # without a word of a parent, once a generation has ended on some machine
REPORT_S = 20.0  # for a parent that still speaks: the kill of its workers may take 5 s each
PAUSE_S = 1.0  # after a longer pause this process itself was stopped, and not the others
RESTART = -1  # exit code of what node 0 decides, if the run does not end


class SingleNode:
    """The only parent of a run: nothing to wait for and no socket."""

    rank = RANK0  # among the parents
    is_node0 = True  # whether this is the parent of rank 0, which decides
    host = ""  # its name in messages, where there are several

    def __init__(self, limits: LaunchConfig) -> None:
        self._limits = limits
        self.stop_asked: Callable[[], int | None] = lambda: None  # the signal by which this parent was asked

    def __enter__(self) -> SingleNode:
        return self

    def __exit__(self, *error: object) -> None: ...

    def next_rendezvous(self, num_workers: int) -> tuple[int, int]:
        """Begin the next generation: the lowest rank of this machine's workers, and how many there are."""
        return 0, num_workers

    def start_exchange(self) -> None:
        """Start the thread after the first fork.

        Later generations are forked while it runs: it holds no lock that a worker takes.
        """

    def outcome(self, own: GroupResult | None, generation: WorkerGroup) -> RunOutcome | None:
        """The outcome on all ranks, once all have ended."""
        return None if own is None else outcome_of([own], generation.stacks)

    def publish_outcome(self, outcome: RunOutcome) -> None:
        """Tell other parents how the run ends, or RESTART."""

    @property
    def remote_stop_signal(self) -> int | None:
        """The signal by which another machine was asked to stop, as far as its parent has said."""
        return None


class MultiNode(SingleNode):
    """This parent among those of all machines. Use it as a context, within which the words are exchanged."""

    def __init__(self, launch: LaunchEnv, store: dist.Store, job: str, limits: LaunchConfig) -> None:
        super().__init__(limits)
        self.rank, self._num_nodes = launch.rank, launch.world_size
        self.is_node0, self.host = launch.rank == RANK0, os.uname().nodename
        self._meeting, self._prefix = store, f"job/{job}/nodes"
        self._others = (
            range(1, self._num_nodes) if self.is_node0 else [RANK0]
        )  # whose words this parent reads
        self._own: dict[str, Any] = {"generation": -1}
        self._messages: Mapping[int, Mapping[str, Any]] = {}
        now = time.monotonic()
        self._last_seen_s = dict.fromkeys(self._others, now)
        self._polled_s, self._ended_s = now, float("inf")
        self._lost_store = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="words of the nodes", daemon=True)

    def __enter__(self) -> MultiNode:
        # A connection of its own: a wait of the main thread holds the lock of the other one. Made before any
        # fork: it looks up a name, for which libc takes a lock that a worker forked meanwhile would never see
        # released.
        self._connection = self._meeting.clone()  # type: ignore[attr-defined]
        return self

    def start_exchange(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.start_exchange()
        self._over.set()
        self._thread.join(LEAVE_S)

    def next_rendezvous(self, num_workers: int) -> tuple[int, int]:
        """Wait for the parents of all machines to begin the next generation."""
        from torch.distributed import DistError

        generation = self._own["generation"] + 1
        self._ended_s = float("inf")
        self._own = {"generation": generation}
        workers = [f"{self._prefix}/generation/{generation}/{node}" for node in range(self._num_nodes)]
        deadline = time.monotonic() + self._limits.init_timeout_s
        try:
            self._meeting.set(workers[self.rank], str(num_workers))
            # Waited for in Python: a wait of the store would not see a signal.
            while late := [node for node, key in enumerate(workers) if not self._meeting.check([key])]:
                if (stop := self.stop_asked()) is not None:
                    text = "stopped by a signal before the workers started"
                    raise RunFailed(RunOutcome(128 + stop, text))
                if self._thread.ident is not None:  # before it is started no node has been heard
                    self._refuse_silent(self._others, self._limits.hang_timeout_s)
                if time.monotonic() > deadline:
                    raise self._node_lost(late)
                time.sleep(0.05)
            counts = [int(self._meeting.get(key)) for key in workers]
        except DistError as error:
            raise self._node_lost([RANK0]) from error
        return sum(counts[: self.rank]), sum(counts)

    def outcome(self, own: GroupResult | None, generation: WorkerGroup) -> RunOutcome | None:
        """Return the outcome on all ranks, which node 0 decides once those of all machines have ended.

        Ends the workers of this machine when those of another one have ended. Raises StalledError for a
        machine that is gone.
        """
        now = time.monotonic()
        if now - self._polled_s > PAUSE_S:
            self._last_seen_s = dict.fromkeys(self._others, now)
        self._polled_s = now
        if own is not None and "report" not in self._own:
            self._own |= {"report": encoded(own), "stop": self.stop_asked()}
        return (
            self._poll_as_leader(own, generation)
            if self.is_node0
            else self._poll_as_follower(own, generation)
        )

    def publish_outcome(self, outcome: RunOutcome) -> None:
        self._own |= {"decision": asdict(outcome)}

    @property
    def remote_stop_signal(self) -> int | None:
        return next((word["stop"] for word in self._messages.values() if word.get("stop")), None)

    def _poll_as_leader(self, own: GroupResult | None, generation: WorkerGroup) -> RunOutcome | None:
        said = {node: self._message_of(node) for node in self._others}
        missing = [node for node, word in said.items() if "report" not in word]
        reports = [] if own is None else [own]
        reports += [decoded(GroupResult, word["report"]) for word in said.values() if "report" in word]
        if len(reports) == self._num_nodes:
            return outcome_of(reports, generation.stacks)
        quiet_s = self._limits.hang_timeout_s
        if ends := [report.end for report in reports if report.end != DONE]:
            self._ended_s = min(self._ended_s, time.monotonic())
            self._own.setdefault("ending", ends[0])
            if own is None:
                generation.end_like_other_node(ends[0])
            quiet_s = min(quiet_s, QUIET_S)
            if time.monotonic() - self._ended_s > self._limits.grace_s + REPORT_S:
                raise self._node_lost(missing)
        self._refuse_silent(missing, quiet_s)
        return None

    def _poll_as_follower(self, own: GroupResult | None, generation: WorkerGroup) -> RunOutcome | None:
        word = self._message_of(RANK0)
        if self._generation_of(RANK0) > self._own["generation"]:
            return RunOutcome(RESTART)  # it has begun before its decision was read
        if decision := word.get("decision"):
            return RunOutcome(**decision)
        if own is None and "ending" in word:
            generation.end_like_other_node(word["ending"])
        self._refuse_silent([RANK0], self._limits.hang_timeout_s if own is None else QUIET_S)
        return None

    def _refuse_silent(self, nodes: Sequence[int], quiet_s: float) -> None:
        now = time.monotonic()
        # One that has not yet spoken imports torch.
        limits = {node: quiet_s if node in self._messages else self._limits.init_timeout_s for node in nodes}
        silent = [node for node, limit_s in limits.items() if now - self._last_seen_s[node] > limit_s]
        if silent or (self._lost_store and not self.is_node0):
            raise self._node_lost(silent or [RANK0])

    def _node_lost(self, nodes: Sequence[int]) -> StalledError:
        set_tcp_timeouts(LEAVE_S)  # of what this process still asks the store
        hosts = [self._messages[node]["host"] for node in nodes if node in self._messages]
        named = f" ({', '.join(hosts)})" if hosts else ""
        return StalledError(
            f"{format_ranks(nodes, 'node')}{named} is gone: its parent process was killed or hangs, or the "
            "machine or the link to it is down. To resume, run the same command on all machines."
        )

    def _generation_of(self, node: int) -> int:
        return int(self._messages.get(node, {}).get("generation", -1))

    def _message_of(self, node: int) -> Mapping[str, Any]:
        """What the node has said of the present generation."""
        is_present = self._generation_of(node) == self._own["generation"]
        return self._messages[node] if is_present else {}

    def _exchange(self) -> None:
        """Say and hear, until the end; the last word is said after it."""
        from torch.distributed import DistError

        others = [f"{self._prefix}/{node}" for node in self._others]
        before: list[bytes] = [b""] * len(others)
        try:
            store = self._connection
            set_tcp_timeouts(self._limits.hang_timeout_s)
            beat, over = 0, False
            while not over:
                over = self._over.wait(EXCHANGE_EVERY_S)
                beat += 1
                word = {**self._own, "beat": beat, "host": self.host}  # a new text each time
                store.set(f"{self._prefix}/{self.rank}", json.dumps(word))
                if not over and store.check(others):
                    texts = store.multi_get(others)
                    self._messages = dict(zip(self._others, map(json.loads, texts), strict=True))
                    for node, text, last in zip(self._others, texts, before, strict=True):
                        if text != last:
                            self._last_seen_s[node] = time.monotonic()
                    before = texts
        except DistError:
            self._lost_store = True
